"""run_all.sh --bench and --timeline, and the options that are there for speed."""

import json
import math
import random

import pytest
from conftest import METHODS, ROOT, launch, load, make_images, train

from common import bench, timeline

TINY = ["--arch", "resnet18", "--image-size", 32, "--batch-size", 8]


def test_summary():
    """Two starts, and two turns of two processes: a step ends with the slower one, and a turn's first may not count."""

    def starting(launch, first, memory):
        return {"launch": launch, "marks": [launch + first, launch + 100], "waits": [9, 9], "memory": memory}

    def turn(begin, times, memory):
        marks = [begin + sum(times[:i]) for i in range(len(times) + 1)]
        return {"steps": 2, "marks": marks, "waits": [9, 0.1, 0.3], "memory": memory}

    reports = [
        [starting(100, 5, 8), starting(100, 6, 8)],
        [turn(300, [3, 1, 1], 10), turn(300, [3, 1, 2], 20)],
        [starting(400, 4, 8), starting(400, 3, 8)],
        [turn(600, [2, 3, 3], 10), turn(600, [2, 3, 1], 14)],
    ]
    assert bench.summary(reports, 8) == {
        "images_per_second": pytest.approx(8 / 2.5),  # steps: 1, 2, 3, 3 seconds
        "rounds": [pytest.approx(8 / 1.5), pytest.approx(8 / 3)],
        "first_step": 5,
        "memory": 17,
        "gpu_memory": 0,
        "waiting": pytest.approx(0.2 / 2.5),
    }


def test_standard_error():
    """As theory has it for medians of many normal numbers; ups and downs that two have in common do not count."""
    draw = random.Random(0)
    ours, theirs = ([draw.gauss(100, 5) for _ in range(n)] for n in (400, 900))
    expected = 0.05 * math.sqrt(math.pi / 2) * math.sqrt(1 / 400 + 1 / 900)
    assert bench.standard_error(ours, theirs) == pytest.approx(expected, rel=0.2)
    assert bench.standard_error(ours, [speed * 2 for speed in ours]) == pytest.approx(0, abs=1e-12)
    turns = {"images_per_second": 12.0, "rounds": [11.0, 12.0, 13.0], "first_step": 1, "memory": 2e6, "waiting": None}
    turns["gpu_memory"] = 0
    figures = {("bare", 1, ""): turns, ("02_distributed", 1, ""): turns}
    limit = bench.COLUMNS.index("of the limit")
    assert [bench.row(racer, figures, {})[limit] for racer in figures] == ["1.00", "1.00 +- 0.00"]


@pytest.mark.full
@pytest.mark.parametrize("nproc, memory", [(1, "short"), (2, "enough")])
def test_bench_measures_all(nproc, memory, tmp_path):
    """Also where memory is too short to hold all of them: played, each start takes a fourth of it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, psutil, types; left = itertools.cycle([4e9, 3e9])\n"
        "psutil.virtual_memory = lambda: types.SimpleNamespace(available=next(left))\n"
    )
    env = {"PYTHONPATH": tmp_path} if memory == "short" else {}
    options = ["--bench", "--rounds", 1, "--steps", 1, *TINY]
    result = launch("bash", ROOT / "run_all.sh", *options, NPROC=nproc, RUNS=tmp_path, timeout=300, **env)
    assert result.returncode == 0, result.output
    assert result.output.count("starting  02_distributed 1") == 1
    assert result.output.count("starting  bare 1") == (2 if memory == "short" else 1)  # tried with, and then alone
    figures = json.loads((tmp_path / "bench.json").read_text())["figures"]
    wanted = {f"{method} x 1" for method in ["bare", *METHODS]}
    if nproc == 2:
        wanted |= {f"{method} x 2" for method in ["bare", *METHODS[1:]]}
    assert figures.keys() == wanted
    for figure in figures.values():
        assert figure["images_per_second"] > 0 and figure["first_step"] > 0 and figure["memory"] > 1e8
    assert "of the limit" in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench.png").stat().st_size > 10_000


@pytest.mark.full
@pytest.mark.parametrize("method", ["02_distributed", "03_multiprocessing", "05_horovod"])
def test_gradients_of_16_bits(method, tmp_path):
    """Nearly the same weights: not the same, or the option would do nothing."""
    options = ["--epochs", 1, "--max-steps", 3, "--workers", 0]
    weights = []
    for option in ([], ["--fp16-allreduce"]):
        train(method, *options, *option, "--output", tmp_path / str(len(weights)))
        weights.append(load(tmp_path / str(len(weights)))["model"]["0.weight"])
    assert 0 < (weights[0] - weights[1]).abs().max() < 1e-3


@pytest.mark.full
def test_bench_measures_files(tmp_path):
    data = make_images(tmp_path / "images", 80, 8)
    options = ["--bench", "--rounds", 2, "--steps", 1, *TINY, "--data", data, "--workers", 1]
    result = launch("bash", ROOT / "run_all.sh", *options, NPROC=1, RUNS=tmp_path, timeout=300)
    assert result.returncode == 0, result.output
    figures = json.loads((tmp_path / "bench.json").read_text())["figures"]
    decoding = [name for name in figures if name.startswith("decoding")]
    assert {name for name in figures if "files" in name} == {f"{m} x 1 from files" for m in METHODS} | set(decoding)
    assert figures[decoding[0]]["images_per_second"] > 0


@pytest.mark.parametrize(
    "options, line",
    [
        (["--bench", "--rounds", "0"], "argument --rounds: 0 is out of range, which is 1 or more"),
        pytest.param(["--bench", "--arch", "resnet19"], "--arch: resnet19 is neither cnn nor", marks=pytest.mark.full),
        pytest.param(["--bench", "--data", "nowhere"], "--data: ", marks=pytest.mark.full),
        (["--timeline", "--slow-rank", "2"], "--slow-rank: there are ranks 0 to 1 only"),
    ],
)
def test_wrong_options(options, line, tmp_path):
    result = launch("bash", ROOT / "run_all.sh", *options, NPROC=2, RUNS=tmp_path)
    assert result.returncode == 2
    assert result.output.startswith(f"error: {line}") and result.output.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_timeline(tmp_path):
    """Reductions start while backward still runs, and the others wait for a slow rank."""
    options = ["--timeline", "--slow-rank", 1, "--image-size", 48]
    result = launch("bash", ROOT / "run_all.sh", *options, NPROC=2, RUNS=tmp_path, timeout=300)
    assert result.returncode == 0, result.output
    for method in METHODS:
        folder = tmp_path / "timeline" / method
        assert (tmp_path / "timeline" / f"{method}.png").stat().st_size > 10_000
        ranks = [timeline.read(file) for file in sorted(folder.glob("*.trace.json"))]
        if method == "01_dataparallel":
            assert len(ranks) == 1
            continue
        if method == "05_horovod":
            ranks[0] += timeline.read_horovod(folder / "horovod.json", ranks[0])
        times = [{kind: [span[1:] for span in spans if span[0] == kind] for kind in timeline.KINDS} for spans in ranks]
        assert all(len(rank["forward"]) == len(rank["backward"]) == timeline.TRACED for rank in times)
        begin, end = times[0]["backward"][-1]
        assert any(begin < start < end for start, _ in times[0][timeline.ALL_REDUCE])
        assert len(times[1]["made slow on purpose"]) == timeline.TRACED and not times[0]["made slow on purpose"]
        waits = [[end - start for start, end in rank["waiting for gradients"]] for rank in times]
        assert any(fast > slow for fast, slow in zip(*waits, strict=True))  # in a step that nothing else disturbs


@pytest.mark.full
def test_compile_without_a_compiler():
    result = launch("bash", ROOT / "02_distributed" / "run.sh", "--compile", CXX="no-such-g++")
    assert result.returncode == 2
    lines = [line for line in result.output.splitlines() if line.startswith("error")]
    assert lines == [
        "error: --compile: needs g++ and Python's headers. Debian and Ubuntu: apt-get install g++ python3-dev"
    ]
