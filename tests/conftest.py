"""What the tests share: starting the scripts as a user does, and a tiny data set of JPEG files."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CLASSES = ["cat", "红 花"]
HAS_APEX = importlib.util.find_spec("apex") is not None  # then 04_apex/run.sh runs main.py
METHODS = ["01_dataparallel", "02_distributed", "03_multiprocessing", "04_apex", "05_horovod"]


def environment(**changes):
    """Returns the environment of a user who has activated the Python that runs these tests, and has no GPU."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAX_RESTARTS", "NPROC", "OMP_NUM_THREADS", "RUNS")
        and name not in ("HOSTS", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")
    }
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    return env | {"CUDA_VISIBLE_DEVICES": ""} | {name: str(value) for name, value in changes.items()}


@contextlib.contextmanager
def started(*command, cwd=None, **env):
    """Starts a command without a terminal; yields it, and at the end kills whatever is left of it."""
    env["TEST_MARK"] = mark = str(uuid.uuid4())
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    process.mark = mark
    try:
        yield process
    finally:
        kill(mark)
        process.wait()
        process.stdout.close()


def marked(mark):
    """Returns the ids of all processes with this mark in their environment: not all are in one process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if f"TEST_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill(mark):
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def ranks(run):
    """Returns the psutil processes that train, in the order of their ranks: not launchers, not loaders' workers."""
    scripts, spawned = {}, {}
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            arguments = [part for part in line[1:] if not part.startswith("-")]
            if any("spawn_main" in part for part in line):
                spawned[process.pid] = process
            elif arguments and Path(arguments[0]).name in ("main.py", "native.py") and "torchrun" not in line[1]:
                scripts[process.pid] = process
    found = {pid: process for pid, process in scripts.items() if process.ppid() not in scripts}  # no forked workers
    if len(found) == 1 and any(process.ppid() in found for process in spawned.values()):  # 03's
        found = {pid: process for pid, process in spawned.items() if process.ppid() in found}
    # The launchers number them in the environment; mp.spawn starts them in their order.
    env = {pid: process.environ() for pid, process in found.items()}
    rank = {pid: int(env[pid].get("RANK", env[pid].get("HOROVOD_RANK", pid))) for pid in found}
    return [found[pid] for pid in sorted(found, key=rank.get)]


def launch(*command, timeout=120, **kwargs):
    """Runs a command to its end; returns it with all that it printed, as text, in `output`."""
    with started(*command, **kwargs) as process:
        process.output, _ = process.communicate(timeout=timeout)
    return process


def train(method, *options, nproc=2, **kwargs):
    """Runs a method's run.sh, which must succeed."""
    result = launch("bash", ROOT / method / "run.sh", *options, NPROC=nproc, **kwargs)
    assert result.returncode == 0, result.output
    return result


def wait_for(run, words):
    """Reads what a run prints until there is a line with these words; returns the text."""
    text = ""
    for line in run.stdout:
        text += line
        if words in line:
            return text
    raise AssertionError(f"it ended before it said {words!r}:\n{text}")


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result


def ended(run, seconds):
    """Waits for a run's end, and returns what it printed from now on. It may not leave a process."""
    late = threading.Timer(seconds, lambda: [os.kill(pid, signal.SIGKILL) for pid in marked(run.mark)])
    late.start()
    text = run.stdout.read()  # to the end: until the last process has closed it
    run.wait()
    on_time = late.is_alive()
    late.cancel()
    assert on_time, f"not all ended within {seconds} s: {text}"
    wait_until(lambda: not marked(run.mark), seconds=5)
    return text


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def load(output, name="last.pt"):
    return torch.load(Path(output) / name, weights_only=True)


def metrics(output):
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def by_hand(data, file, arch, size):
    """Validates a checkpoint one image after the other; returns loss, top-1 and top-5 in %, number of images."""
    from common.data import build_datasets
    from common.model import build_model

    _, val_set = build_datasets(str(data), size)
    model = build_model(arch, len(val_set.classes))
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    model.eval()
    loss = top1 = top5 = 0.0
    with torch.no_grad():
        for image, label in val_set:
            output = model(image[None])[0]
            loss += F.cross_entropy(output, torch.tensor(label)).item()
            better = (output > output[label]).sum().item()
            top1 += better < 1
            top5 += better < 5
    return [loss / len(val_set), 100 * top1 / len(val_set), 100 * top5 / len(val_set), len(val_set)]


def make_images(root, train_images, val_images, classes=("cat", "dog"), size=(40, 32)):
    """Writes an ImageFolder tree of JPEG files, `train_images` and `val_images` in all, the classes in turn."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", train_images), ("val", val_images)):
        for label in classes:
            (root / split / label).mkdir(parents=True)
        for i in range(count):
            width, height = size
            noise = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(noise.numpy()).save(root / split / classes[i % len(classes)] / f"{i:03}.jpg")
    return root


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """16 training and 7 validation JPEG files of two classes, with names that a careless script would not survive."""
    return make_images(tmp_path_factory.mktemp("my 图 片"), 16, 7, CLASSES)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repository without its data, under a path with a space."""
    copy = tmp_path / "my checkout"
    ignore = shutil.ignore_patterns(".git", ".venv", "data", "runs", "tests", "__pycache__", ".*cache")
    shutil.copytree(ROOT, copy, ignore=ignore)
    return copy
