"""A checkpoint is never half-written: not by a killed run, not on a full disk."""

import itertools
import os
import random
import re
import runpy
import signal
import time

import pytest
import torch
import torchvision
from conftest import ROOT, launch, load, make_images, metrics, started, train

TINY = ["--workers", 0, "--max-steps", 1]


def test_killed_while_writing(tmp_path):
    """A process that does nothing but write checkpoints is killed 25 times, up to 50 ms after it began a file."""
    save_checkpoint = runpy.run_path(str(ROOT / "02_distributed" / "main.py"))["save_checkpoint"]
    rng = random.Random(0)
    done = 0
    for _ in range(25):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # the parent's threads are not there after a fork
                for epoch in itertools.count(done + 1):
                    history = [{"epoch": n + 1, "top1": 50.0} for n in range(epoch)]
                    model = {"weight": torch.full((2_000_000,), float(epoch))}
                    save_checkpoint({"model": model, "best_top1": 50.0, "history": history}, tmp_path)
            finally:
                os._exit(1)  # whatever happens: a child must not go on with the tests
        try:
            deadline = time.monotonic() + 20
            while not any(tmp_path.glob("*.tmp")):  # until it has begun to write something
                assert time.monotonic() < deadline
            time.sleep(rng.uniform(0, 0.05))
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)  # until then it could write
        for name in ("best.pt", "last.pt"):
            if (tmp_path / name).exists():
                checkpoint = load(tmp_path, name)
                epoch = len(checkpoint["history"])
                assert (checkpoint["model"]["weight"] == epoch).all()
                lines = [line["epoch"] for line in metrics(tmp_path)]
                assert lines in (list(range(1, epoch + 1)), list(range(1, epoch + 2)))  # last.pt is renamed last
                done = epoch  # the next process goes on from last.pt, read last
        for leftover in tmp_path.glob("*.tmp"):
            leftover.unlink()
    assert done  # it was not always killed before the first one


def test_all_scripts_write_alike():
    texts = {
        re.search(r"^def save_checkpoint.*?^(?=def )", script.read_text(), re.DOTALL | re.MULTILINE)[0]
        for script in ROOT.glob("0*/*.py")
    }
    assert len(texts) == 1


@pytest.mark.full
def test_killed_run_resumes(tmp_path):
    """All processes are killed at some moment after the second epoch; the same command line then goes on."""
    command = ["bash", ROOT / "02_distributed" / "run.sh", *TINY, "--output", tmp_path, "--resume", "--epochs"]
    with started(*command, 100_000) as run:
        for line in run.stdout:
            if line.startswith("epoch 3 "):
                break
    # That killed all of its processes.
    done = load(tmp_path)["epoch"]
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "tor')  # worse than any kill can do
    result = launch(*command, done + 2)
    assert result.returncode == 0, result.output
    assert f"resuming from {tmp_path}/last.pt" in result.output
    assert [line["epoch"] for line in metrics(tmp_path)] == list(range(1, done + 3))


@pytest.mark.full
def test_checkpoint_in_plain_pytorch(tmp_path, monkeypatch):
    """The two lines of the README, as they stand there, where a run of resnet18 on ten classes has left its last.pt."""
    data = make_images(tmp_path / "ten", 10, 10, [str(digit) for digit in range(10)])
    options = ["--data", data, "--image-size", 32, "--batch-size", 5, *TINY, "--epochs", 1]
    train("01_dataparallel", *options, "--output", tmp_path)
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) == 2
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "torchvision": torchvision}
    exec(code, names)
    for name, weight in names["model"].state_dict().items():
        assert torch.equal(weight, load(tmp_path)["model"][name])


@pytest.mark.full
def test_horovod_resumes_without_momentum(tmp_path):
    """Where there is none, Horovod's broadcast of the optimizer's state must not move the weights, nor wait."""
    options = ["--workers", 0, "--max-steps", 2, "--weight-decay", 0.1, "--lr", 0.5]
    train("01_dataparallel", *options, "--momentum", 0, "--epochs", 1, "--output", tmp_path)
    expected = "val loss {val_loss:.4f}".format(**metrics(tmp_path)[0])
    result = train("05_horovod", *options, "--evaluate", "--resume", tmp_path / "last.pt")
    assert expected in result.output


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A run of one epoch."""
    folder = tmp_path_factory.mktemp("output")
    train("01_dataparallel", *TINY, "--epochs", 1, "--output", folder)
    return folder


@pytest.mark.full
def test_the_best_so_far_counts_after_resuming(tmp_path):
    """Where an earlier epoch was better than any later one can be, best.pt stays that epoch's."""
    train("01_dataparallel", *TINY, "--epochs", 1, "--output", tmp_path)
    torch.save(load(tmp_path) | {"best_top1": 100.5}, tmp_path / "last.pt")
    before = (tmp_path / "best.pt").read_bytes()
    train("02_distributed", *TINY, "--epochs", 2, "--output", tmp_path, "--resume")
    assert (tmp_path / "best.pt").read_bytes() == before
    assert load(tmp_path)["best_top1"] == 100.5 and load(tmp_path)["epoch"] == 2


# In all scripts it is the same function: see above.
@pytest.mark.parametrize("method", ["02_distributed", pytest.param("05_horovod", marks=pytest.mark.full)])
def test_full_disk(method, output):
    """Played by a limit on the size of files, which the checkpoint of cnn, 1.5 MB, is above."""
    before = {name: (output / name).read_bytes() for name in os.listdir(output)}
    script = 'ulimit -f 1000; exec bash "$0" "$@"'
    options = [*TINY, "--output", output, "--resume", "--epochs", 2]
    result = launch("bash", "-c", script, ROOT / method / "run.sh", *options, NPROC=1)
    assert result.returncode != 0, result.output
    (line,) = [line for line in result.output.splitlines() if "error: --output" in line]
    assert f"cannot write to {output}, its last.pt is still the previous one" in line
    assert {name: (output / name).read_bytes() for name in os.listdir(output)} == before
