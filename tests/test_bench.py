"""run_all.sh --bench, and the options that are there for speed."""

import json

import pytest
from conftest import METHODS, ROOT, launch, load, train

FULL = [pytest.param(method, marks=pytest.mark.full) for method in ("03_multiprocessing", "05_horovod")]
TINY = ["--arch", "resnet18", "--image-size", 32, "--batch-size", 8]


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.full)])
def test_bench_measures_all(nproc, tmp_path):
    options = ["--bench", "--rounds", 1, "--steps", 2, *TINY]
    result = launch("bash", ROOT / "run_all.sh", *options, NPROC=nproc, RUNS=tmp_path, timeout=200)
    assert result.returncode == 0, result.output
    figures = json.loads((tmp_path / "bench.json").read_text())["figures"]
    wanted = {f"{method} x 1" for method in ["bare", *METHODS]}
    if nproc == 2:
        wanted |= {f"{method} x 2" for method in ["bare", *METHODS[1:]]}
    assert figures.keys() == wanted
    for figure in figures.values():
        assert figure["images_per_second"] > 0 and figure["first_step"] > 0 and figure["memory"] > 1e8
    assert "of the limit" in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench.png").stat().st_size > 10_000


@pytest.mark.parametrize("method", ["02_distributed", *FULL])
def test_gradients_of_16_bits(method, tmp_path):
    """Nearly the same weights: not the same, or the option would do nothing."""
    options = ["--epochs", 1, "--max-steps", 3, "--workers", 0]
    weights = []
    for option in ([], ["--fp16-allreduce"]):
        train(method, *options, *option, "--output", tmp_path / str(len(weights)))
        weights.append(load(tmp_path / str(len(weights)))["model"]["0.weight"])
    assert 0 < (weights[0] - weights[1]).abs().max() < 1e-3
