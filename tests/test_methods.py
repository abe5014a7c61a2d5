"""Every script on JPEG files with two processes: what a run says and leaves, and stopping and resuming."""

import math
import os
import re

import pytest
import torch
from conftest import CLASSES, HAS_APEX, METHODS, ROOT, by_hand, launch, load, metrics, train

# A network with batch norm and dropout, on small, augmented images.
SMALL = ["--arch", "mobilenet_v3_small", "--image-size", 32, "--batch-size", 8, "--workers", 2]
# Every Python of the run imports this. A thread of gloo's that outlives main() may still hold a tensor of Python's, and
# aborts the process, now and then, when it lets go of that while Python shuts down.
SITECUSTOMIZE = """
import atexit, pathlib
def left():
    for file in pathlib.Path("/proc/self/task").glob("*/comm"):
        if "gloo" in (name := file.read_text()):
            print("left at exit:", name)
atexit.register(left)
"""


@pytest.fixture(scope="module", params=METHODS)
def run(request, images, tmp_path_factory):
    """A run of 2 epochs that nothing interrupts."""
    output = tmp_path_factory.mktemp(request.param) / "out put"
    # From / and without a relative path, as a user anywhere, whose terminal knows no Chinese.
    options = ["--data", images, *SMALL, "--epochs", 2, "--output", output, "--resume"]
    folder = tmp_path_factory.mktemp("at_exit")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    result = train(request.param, *options, cwd="/", PYTHONIOENCODING="ascii", PYTHONPATH=path)
    return request.param, output, result.output


def test_rank_0_alone_says_what_runs_where(run):
    method, output, text = run
    processes = 1 if method == "01_dataparallel" else 2
    assert len(re.findall(rf", processes: {processes} \(cpu", text)) == 1
    assert text.count(f"batches of 8, {8 // processes} per process; results: {output}") == 1
    assert text.count(f"starting afresh: there is no {output}/last.pt yet") == 1
    for epoch in (1, 2):
        assert text.count(f"epoch {epoch}  train loss") == 1
    if method == "01_dataparallel":
        assert "nothing to split" in text
    if method == "04_apex":
        assert ("running native.py" in text) != ("apex.amp off" in text)
    assert "left at exit" not in text
    if method != "04_apex" or not HAS_APEX:  # it calls itself deprecated
        assert "Warning" not in text


def test_metrics_lines_are_complete(run):
    _, output, _ = run
    lines = metrics(output)
    assert [line["epoch"] for line in lines] == [1, 2]
    for line in lines:
        assert line["lr"] == 0.05 and line["val_images"] == 7
        assert math.isfinite(line["train_loss"]) and math.isfinite(line["val_loss"])
        assert line["top1"] in [pytest.approx(100 * right / 7) for right in range(8)]
        assert line["top5"] == 100  # of two classes
        assert line["images_per_second"] > 0 and line["seconds"] > 0


def test_checkpoint_holds_the_plain_model(run):
    _, output, _ = run
    checkpoint = load(output)
    assert checkpoint["epoch"] == 2 and checkpoint["classes"] == CLASSES
    assert checkpoint["arch"] == "mobilenet_v3_small" and "--batch-size" in checkpoint["command"]
    from common.model import build_model

    torch.manual_seed(0)
    fresh = build_model("mobilenet_v3_small", 2).state_dict()
    assert checkpoint["model"].keys() == fresh.keys()
    moved = checkpoint["model"]["features.0.0.weight"] - fresh["features.0.0.weight"]
    assert 0 < moved.abs().max() < 1  # a few steps from the weights of --seed 0
    assert checkpoint["optimizer"]["state"]  # momentum
    assert sorted(os.listdir(output)) == ["best.pt", "last.pt", "metrics.jsonl"]
    history = checkpoint["history"]
    assert history == metrics(output)
    best = load(output, "best.pt")
    assert best["history"][-1]["top1"] == best["best_top1"] == max(line["top1"] for line in history)


def test_validation_is_of_the_model_that_is_saved(run, images):
    """Also its batch norm's statistics, of which every process has its own while it trains."""
    _, output, _ = run
    line = metrics(output)[-1]
    ended = [line["val_loss"], line["top1"], line["top5"], line["val_images"]]
    assert ended == pytest.approx(by_hand(images, output / "last.pt", "mobilenet_v3_small", 32), abs=1e-6)


def flatten(state):
    """Yields the tensors and numbers of a nested state, in order."""
    if isinstance(state, dict):
        state = [state[key] for key in sorted(state, key=str)]
    if isinstance(state, list):
        for part in state:
            yield from flatten(part)
    else:
        yield state


HERE = [pytest.param(method, marks=[] if method == "02_distributed" else pytest.mark.full) for method in METHODS]


@pytest.mark.parametrize("run", HERE, indirect=True)
def test_stopped_and_resumed_is_the_same_to_the_bit(run, images, tmp_path):
    """An epoch, started by the script's own launch command, the first in its docstring; then another by run.sh."""
    method, output, _ = run
    script = os.path.relpath(load(output)["command"][0], ROOT)  # of 04's two the one that ran
    command = re.search(r"^    (.+)$", (ROOT / script).read_text().split('"""')[1], re.MULTILINE)[1]
    options = ["--data", images, *SMALL, "--output", tmp_path]
    # As many threads as run.sh gives to each process: with more, sums are rounded otherwise.
    threads = max(1, len(os.sched_getaffinity(0)) // metrics(output)[0]["processes"])
    result = launch(*command.split(), *options, "--epochs", 1, cwd=ROOT, OMP_NUM_THREADS=threads)
    assert result.returncode == 0, result.output
    result = train(method, *options, "--epochs", 2, "--resume")
    assert f"resuming from {tmp_path}/last.pt" in result.output and "epoch 1 " not in result.output

    once, twice = load(output), load(tmp_path)
    for part in ("model", "optimizer", "scheduler"):
        for a, b in zip(flatten(once[part]), flatten(twice[part]), strict=True):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    timing = {"seconds": 0, "images_per_second": 0}
    assert [line | timing for line in metrics(output)] == [line | timing for line in metrics(tmp_path)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("method", METHODS)
def test_on_all_gpus(method, images, tmp_path):
    gpus = torch.cuda.device_count()
    options = ["--data", images, *SMALL, "--batch-size", 2 * gpus, "--max-steps", 1, "--output", tmp_path]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    train(method, *options, "--epochs", 1, nproc=gpus, CUDA_VISIBLE_DEVICES=visible)
    train(method, *options, "--epochs", 2, "--resume", nproc=gpus, CUDA_VISIBLE_DEVICES=visible)
    assert load(tmp_path)["model"]["features.0.0.weight"].is_cuda or method == "05_horovod"  # its build may be for CPUs


def test_five_texts_differ_by_their_method_alone():
    """As many lines as a reader compares at a glance, and no main.py longer than one that is read to the end."""
    pairs = [
        ("01_dataparallel/main.py", "02_distributed/main.py"),
        ("02_distributed/main.py", "03_multiprocessing/main.py"),
        ("02_distributed/main.py", "04_apex/main.py"),
        ("04_apex/main.py", "04_apex/native.py"),
        ("02_distributed/main.py", "05_horovod/main.py"),
    ]
    for pair in pairs:
        difference = launch("diff", *pair, cwd=ROOT).output.splitlines()
        assert len([line for line in difference if line[0] in "<>"]) <= 45, pair
    for script in ROOT.glob("0*/*.py"):
        assert len(script.read_text().splitlines()) <= 230, script
