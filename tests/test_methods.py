"""Every script for one step on JPEG files with two processes, through its run.sh; and started in the other ways."""

import math
import os
import re

import pytest
import torch
from conftest import METHODS, ROOT, launch, load, metrics, train


@pytest.fixture(scope="module", params=METHODS)
def run(request, images, tmp_path_factory):
    output = tmp_path_factory.mktemp(request.param) / "out put"
    options = ["--data", images, "--arch", "resnet18", "--image-size", 32, "--batch-size", 8]
    # From / and without a relative path, as a user anywhere.
    result = train(request.param, *options, "--epochs", 1, "--max-steps", 1, "--output", output, cwd="/")
    return request.param, output, result.output


def test_rank_0_alone_says_what_runs_where(run):
    method, output, text = run
    processes = 1 if method == "01_dataparallel" else 2
    assert len(re.findall(rf", processes: {processes} \(cpu", text)) == 1
    assert text.count(f"batches of 8, {8 // processes} per process; results: {output}") == 1
    assert text.count("epoch 1  train loss") == 1
    if method == "01_dataparallel":
        assert "nothing to split" in text
    if method == "04_apex":
        assert ("running native.py" in text) != ("apex.amp off" in text)


def test_metrics_line_is_complete(run):
    _, output, _ = run
    (line,) = metrics(output)
    assert line["epoch"] == 1 and line["lr"] == 0.05 and line["val_images"] == 7
    assert math.isfinite(line["train_loss"]) and math.isfinite(line["val_loss"])
    assert line["top1"] in [pytest.approx(100 * right / 7) for right in range(8)]
    assert line["top5"] == 100  # of two classes
    assert line["images_per_second"] > 0 and line["seconds"] > 0


def test_checkpoint_holds_the_plain_model(run):
    _, output, _ = run
    checkpoint = load(output)
    assert checkpoint["epoch"] == 1 and checkpoint["classes"] == ["cat", "dog"] and checkpoint["arch"] == "resnet18"
    from common.model import build_model

    torch.manual_seed(0)
    fresh = build_model("resnet18", 2).state_dict()
    assert checkpoint["model"].keys() == fresh.keys()
    moved = checkpoint["model"]["conv1.weight"] - fresh["conv1.weight"]
    assert 0 < moved.abs().max() < 1  # one step from the weights of --seed 0
    assert checkpoint["optimizer"]["state"]  # momentum
    assert sorted(os.listdir(output)) == ["best.pt", "last.pt", "metrics.jsonl"]


def launch_commands():
    """Returns each script's own launch command for one machine, the first in its docstring, by script."""
    commands = {}
    for script in sorted(ROOT.glob("0*/*.py")):
        docstring = script.read_text().split('"""')[1]
        commands[str(script.relative_to(ROOT))] = re.search(r"^    (.+)$", docstring, re.MULTILINE)[1]
    return commands


@pytest.mark.parametrize("script", launch_commands())
def test_docstring_command(script, tmp_path):
    command = launch_commands()[script]
    if script == "04_apex/main.py":
        pytest.importorskip("apex.amp", reason="no Apex with amp here", exc_type=ImportError)
    options = ["--epochs", 1, "--max-steps", 1, "--output", tmp_path]
    result = launch(*command.split(), *options, cwd=ROOT)
    assert result.returncode == 0, result.output
    assert load(tmp_path)["epoch"] == 1
    assert metrics(tmp_path)[0]["processes"] == (1 if command.startswith("python3 01") else 2)


@pytest.mark.parametrize("flag", ["--local_rank=0", "--local-rank=0"])
def test_torch_distributed_launch_and_its_old_flag(flag, images, tmp_path):
    """The article's own launcher: it passes --local-rank itself, which in the article's days was --local_rank."""
    script = [ROOT / "02_distributed" / "main.py"]
    if "_" in flag:  # as the launcher of those days did
        script = ["--use-env", *script, flag]
    options = ["--data", images, "--arch", "resnet18", "--image-size", 32, "--batch-size", 8, "--workers", 0]
    launcher = ["python3", "-m", "torch.distributed.launch", "--nproc_per_node=1", "--standalone", *script]
    result = launch(*launcher, *options, "--max-steps", 1, "--epochs", 1, "--output", tmp_path)
    assert result.returncode == 0, result.output
    assert metrics(tmp_path)[0]["val_images"] == 7
