"""Validation is exact: whatever the number of processes, every image counts once, and the checkpoint says the same."""

import os
import re

import pytest
import torch
from conftest import METHODS, ROOT, by_hand, launch, make_images, train

from common.model import build_model

OPTIONS = ["--arch", "mobilenet_v3_small", "--image-size", 32, "--workers", 0]
CLASSES = [f"class {i}" for i in range(6)]  # one more than five, for top-5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network with batch norm, trained by two processes with different images; 7 validation images. Returns paths."""
    data = make_images(tmp_path_factory.mktemp("seven"), 12, 7, CLASSES)
    output = tmp_path_factory.mktemp("trained")
    train(
        "02_distributed", "--data", data, *OPTIONS, "--batch-size", 4, "--lr", 1e-3, "--epochs", 2, "--output", output
    )
    return data, output


def figures(text):
    (line,) = re.findall(r"val loss (\S+)  top-1 (\S+) %  top-5 (\S+) %  \((\d+) images\)", text)
    return [float(number) for number in line]


LAUNCHER = ["python3", "-m", "torch.distributed.launch", "--standalone"]  # the article's, torchrun's forerunner


OTHERS = [pytest.param(method, marks=pytest.mark.full) for method in METHODS if method != "02_distributed"]


@pytest.mark.parametrize("method", ["02_distributed", *OTHERS])
def test_seven_images_and_three_processes(method, trained):
    """Shares of 3, 2 and 2 images in batches of 2: the last ones are of one image, or there is none."""
    data, output = trained
    options = ["--data", data, *OPTIONS, "--batch-size", 6, "--evaluate", "--resume", output / "last.pt"]
    if method == "02_distributed":  # passes on --local-rank
        result = launch(*LAUNCHER, "--nproc_per_node=3", ROOT / method / "main.py", *options, OMP_NUM_THREADS=1)
        assert result.returncode == 0, result.output
    else:
        result = train(method, *options, nproc=3)
    loss, top1, top5, count = by_hand(data, output / "last.pt", "mobilenet_v3_small", 32)
    assert figures(result.output) == [pytest.approx(loss, abs=1e-6), round(top1, 2), round(top5, 2), count]


@pytest.mark.parametrize("method", ["02_distributed", pytest.param("05_horovod", marks=pytest.mark.full)])
def test_one_image_and_two_processes(method, tmp_path):
    data = make_images(tmp_path / "one", 4, 1, ["only class"])
    torch.save(build_model("mobilenet_v3_small", 1).state_dict(), tmp_path / "weights.pt")
    options = ["--data", data, *OPTIONS, "--batch-size", 4, "--evaluate", "--resume", tmp_path / "weights.pt"]
    if method == "02_distributed":  # as the launcher of the article's days called the script
        script = ["--use-env", "--nproc_per_node=2", ROOT / method / "main.py", "--local_rank=0"]
        result = launch(*LAUNCHER, *script, *options, OMP_NUM_THREADS=1)
        assert result.returncode == 0, result.output
    else:
        result = train(method, *options)
    assert figures(result.output) == [0, 100, 100, 1]  # whatever the image, of one class


@pytest.mark.parametrize(
    ("method", "epochs"), [pytest.param("01_dataparallel", 1, marks=pytest.mark.full), ("05_horovod", 2)]
)
def test_resuming_a_finished_run_trains_nothing(method, epochs, trained):
    """Nor does it with fewer --epochs than there are; the files stay as they are."""
    data, output = trained
    before = {name: (output / name).stat().st_mtime_ns for name in os.listdir(output)}
    options = ["--data", data, *OPTIONS, "--batch-size", 4, "--epochs", epochs, "--output", output, "--resume"]
    text = train(method, *options).output
    assert f"nothing to train: 2 of {epochs} epochs are done" in text and "train loss" not in text
    assert {name: (output / name).stat().st_mtime_ns for name in os.listdir(output)} == before
