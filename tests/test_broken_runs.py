"""A run that breaks or is stopped: all of it ends, says why in a line, leaves last.pt whole, and can be resumed.

run.sh is what is started. It ends the processes of all scripts alike; what a launcher does itself is tried with each
launcher: 02 has torchrun (as 04), 03 mp.spawn, 05 horovodrun, 01 none.
"""

import contextlib
import os
import signal
import tempfile

import pytest
import torch
from conftest import (
    METHODS,
    ROOT,
    ended,
    launch,
    load,
    marked,
    metrics,
    ranks,
    started,
    train,
    wait_for,
    wait_until,
)

FAULTS = ROOT / "tests" / "stand_ins" / "faults"
FULL = pytest.mark.full
LAUNCHERS = ["02_distributed", "03_multiprocessing", "05_horovod"]
SOME_LAUNCHERS = ["02_distributed", *[pytest.param(method, marks=FULL) for method in LAUNCHERS[1:]]]
ENDLESS = ["--workers", 1, "--epochs", 100_000, "--batch-size", 16]


@contextlib.contextmanager
def running(method, folder, *options, **env):
    """Starts a method's run.sh, or a command of its own; its output goes to `folder`/out.

    It may not leave a temporary file, unless its supervise.py was killed.
    """
    command = ["bash", ROOT / method / "run.sh"] if isinstance(method, str) else method
    with tempfile.TemporaryDirectory() as temporary:
        env = {"NPROC": 2, "TMPDIR": temporary} | env
        with started(*command, *ENDLESS, "--output", folder / "out", *options, **env) as run:
            yield run
        assert os.listdir(temporary) == [] or run.returncode == -signal.SIGKILL or command[0] != "bash"


# What breaks by itself


def kill_rank_1(run):
    ranks(run)[1].kill()


def kill_worker(run):
    ranks(run)[-1].children()[0].kill()


CAUSES = {
    ("kill_rank_1", "02_distributed"): ["rank      : 1", "(SIGKILL)"],
    ("kill_rank_1", "03_multiprocessing"): ["error: process 1 terminated with signal SIGKILL"],
    ("kill_rank_1", "05_horovod"): ["Process 1 exit with status code 137"],
}


@pytest.mark.parametrize("method", SOME_LAUNCHERS)
def test_a_killed_process(method, tmp_path):
    breaks(method, tmp_path, kill_rank_1, CAUSES["kill_rank_1", method])


@pytest.mark.full
@pytest.mark.parametrize("method", ["01_dataparallel", "02_distributed", "05_horovod"])
def test_a_killed_worker_of_a_loader(method, tmp_path):
    rank = 0 if method == "01_dataparallel" else 1
    breaks(method, tmp_path, kill_worker, [f"error: process {rank}: DataLoader worker"])


def breaks(method, tmp_path, fault, causes):
    with running(method, tmp_path) as run:
        wait_for(run, "epoch 1  train loss")
        wait_until((tmp_path / "out" / "last.pt").exists)
        fault(run)
        text = ended(run, 30)
    assert run.returncode not in (0, 2), text
    assert all(cause in text for cause in causes), text
    assert load(tmp_path / "out")["epoch"] >= 1


@pytest.mark.parametrize("method", SOME_LAUNCHERS)
def test_an_exception_on_one_rank(method, tmp_path):
    with running(method, tmp_path, PYTHONPATH=FAULTS, FAULT="raise 1 3") as run:
        wait_for(run, "batches of 16")
        text = ended(run, 40)
    assert run.returncode not in (0, 2)
    assert "ZeroDivisionError: the fault of this test" in text, text
    # The other one says in a line that it is the consequence.
    assert "error: process 0: another process is gone" in text or method == "03_multiprocessing", text


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("02_distributed", "never 1"),
        pytest.param("05_horovod", "stall 1 3", marks=FULL),
        pytest.param("02_distributed", "stall 1 3", marks=FULL),
        pytest.param("03_multiprocessing", "stall 1 3", marks=FULL),
        pytest.param("05_horovod", "never 1", marks=FULL),
    ],
)
def test_a_rank_that_never_comes_or_stalls(method, fault, tmp_path):
    seconds = 12 if method == "05_horovod" else 5
    with running(method, tmp_path, "--timeout", seconds, PYTHONPATH=FAULTS, FAULT=fault) as run:
        text = ended(run, seconds + 40)
    assert run.returncode not in (0, 2)
    silent = "Wait timeout after 12 seconds for key(s): 1" in text  # of Horovod, which ends at once when one is missing
    assert "error: process 0: another process is gone, or did not answer within --timeout" in text or silent, text


@pytest.mark.parametrize("method", ["02_distributed", pytest.param("05_horovod", marks=FULL)])
def test_a_loss_that_is_not_finite(method, tmp_path):
    """It appears in the second epoch, by a learning rate that the first one's checkpoint was given."""
    tiny = ["--workers", 0, "--max-steps", 2, "--output", tmp_path]
    train("01_dataparallel", *tiny, "--epochs", 1)
    checkpoint = load(tmp_path)
    checkpoint["optimizer"]["param_groups"][0]["lr"] = 1e30
    torch.save(checkpoint, tmp_path / "last.pt")
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    result = launch("bash", ROOT / method / "run.sh", *tiny, "--epochs", 5, "--resume", NPROC=2)
    assert result.returncode == 2
    (line,) = [line for line in result.output.splitlines() if "error" in line]
    assert line.startswith("error: the loss of epoch 2 is not finite: not saved.")
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


@pytest.mark.full
@pytest.mark.parametrize("scale", ["inf", "1024"])
def test_steps_skipped_by_a_scaler_are_no_failure(scale, tmp_path):
    """Played on a CPU: with an infinite scale no step is taken, and the run goes on; with a finite one it grows, also
    from where the run is resumed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import torch.amp; scaler = torch.amp.GradScaler\n"
        f"torch.amp.GradScaler = lambda device, enabled: scaler(device, float('{scale}'), growth_interval=1)\n"
    )
    options = ["--amp", "--max-steps", 3, "--workers", 0, "--output", tmp_path]
    command = ["torchrun", "--standalone", "--nproc_per_node=2", ROOT / "04_apex" / "native.py", *options]
    for epochs in (1, 2):
        result = launch(*command, "--epochs", epochs, "--resume", PYTHONPATH=tmp_path, OMP_NUM_THREADS=1)
        assert result.returncode == 0, result.output
        assert load(tmp_path)["scaler"]["scale"] == float(scale) * 8**epochs
    assert len(metrics(tmp_path)) == 2
    from common.model import build_model

    torch.manual_seed(0)
    fresh = build_model("cnn", 10).state_dict()
    same = all(torch.equal(weight, fresh[name]) for name, weight in load(tmp_path)["model"].items())
    assert same == (scale == "inf")


# What is stopped from outside


def stopped(run, stop, seconds=20):
    text = ended(run, seconds)
    assert run.returncode == -stop
    name = signal.Signals(stop).name
    assert text.count(f"stopped by {name}: --resume goes on from the last finished epoch\n") == 1
    assert not any(word in text for word in ("Traceback", "rror", "arning")), text


@pytest.mark.parametrize("method", [*SOME_LAUNCHERS, *[pytest.param(m, marks=FULL) for m in (METHODS[0], METHODS[3])]])
def test_ctrl_c_in_mid_epoch(method, tmp_path):
    with running(method, tmp_path) as run:
        wait_for(run, "step 50/")
        os.killpg(run.pid, signal.SIGINT)
        stopped(run, signal.SIGINT)


@pytest.mark.parametrize("method", METHODS)
def test_sigterm_to_the_parent_during_start_up(method, tmp_path):
    with running(method, tmp_path) as run:
        wait_until(lambda: ranks(run))
        os.kill(run.pid, signal.SIGTERM)
        stopped(run, signal.SIGTERM)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("when", "stop"), [("validation", signal.SIGTERM), ("checkpointing", signal.SIGINT)])
def test_stopped_during(method, when, stop, tmp_path):
    """Also by a SIGTERM to the whole group and a SIGINT to the parent alone."""
    options = ["--arch", "resnet18", "--image-size", 16, "--max-steps", 50]
    with running(method, tmp_path, *options) as run:
        wait_for(run, "step 50/50")
        if when == "checkpointing":
            wait_until(lambda: list((tmp_path / "out").glob("*.pt.tmp")))
        (os.killpg if stop == signal.SIGTERM else os.kill)(run.pid, stop)
        stopped(run, stop)
    if (tmp_path / "out" / "last.pt").exists():
        load(tmp_path / "out")


@pytest.mark.parametrize("method", ["02_distributed", *[pytest.param(method, marks=FULL) for method in LAUNCHERS[1:]]])
@pytest.mark.parametrize("who", ["run.sh", pytest.param("launcher", marks=FULL)])
def test_run_sh_or_the_launcher_is_killed(method, who, tmp_path):
    with running(method, tmp_path) as run:
        wait_for(run, "step 50/")
        victim = run.pid if who == "run.sh" else launcher(run).pid
        os.kill(victim, signal.SIGKILL)
        text = ended(run, 30)
    if who == "launcher":
        assert run.returncode == 128 + 9 and "was ended by SIGKILL" in text, text


def launcher(run):
    import psutil

    (process,) = psutil.Process(run.pid).children()
    return process


@pytest.mark.full
@pytest.mark.parametrize("method", ["01_dataparallel", "03_multiprocessing"])
def test_ctrl_c_without_run_sh(method, tmp_path):
    with running(["python3", ROOT / method / "main.py"], tmp_path) as run:
        wait_for(run, "step 50/")
        os.killpg(run.pid, signal.SIGINT)
        text = ended(run, 20)
    assert run.returncode == 130
    # A worker that Ctrl-C has ended may still make a thread of the main process complain.
    assert "stopped: --resume goes on from the last finished epoch" in text and "KeyboardInterrupt" not in text, text


@pytest.mark.full
def test_closed_pipe(tmp_path):
    """As by `| head -1`: the rest of the run ends too."""
    with running("02_distributed", tmp_path) as run:
        wait_for(run, "processes: 2")
        run.stdout.close()
        run.wait(timeout=60)
        wait_until(lambda: not marked(run.mark), seconds=20)
    assert run.returncode not in (0, 2)


# What goes on


@pytest.mark.full
@pytest.mark.parametrize("method", ["02_distributed", "04_apex"])
def test_restarted_by_torchrun(method, tmp_path):
    """A killed worker costs the epoch it was in, and nothing else: the weights are those of an undisturbed run."""
    options = ["--epochs", 8, "--workers", 1]
    with running(method, tmp_path, *options, MAX_RESTARTS=1) as run:
        wait_for(run, "epoch 2  train loss")
        ranks(run)[1].kill()
        text = ended(run, 90)
    assert run.returncode == 0, text
    assert f"resuming from {tmp_path}/out/last.pt" in text
    assert [line["epoch"] for line in metrics(tmp_path / "out")] == list(range(1, 9))
    train(method, *ENDLESS, *options, "--output", tmp_path / "undisturbed")
    once = load(tmp_path / "undisturbed")["model"]
    assert all(torch.equal(weight, once[name]) for name, weight in load(tmp_path / "out")["model"].items())


PAIR = [("02_distributed", 1), ("03_multiprocessing", 2)]
MORE = [("02_distributed", 2), ("03_multiprocessing", 1), ("05_horovod", 1), ("05_horovod", 2)]


@pytest.mark.parametrize("jobs", [PAIR, pytest.param(PAIR + MORE, marks=FULL)], ids=len)
def test_jobs_side_by_side(jobs, tmp_path):
    """Jobs with different seeds at once in one checkout: each ends as it would have alone."""
    before = set(os.listdir(ROOT))
    with contextlib.ExitStack() as stack:
        runs = []
        for method, seed in jobs:
            options = ["--epochs", 1, "--workers", 0, "--seed", seed, "--output", tmp_path / f"{method} {seed}"]
            runs.append(stack.enter_context(started("bash", ROOT / method / "run.sh", *options, NPROC=2, cwd=ROOT)))
        for run in runs:
            text, _ = run.communicate(timeout=180)
            assert run.returncode == 0, text
    assert set(os.listdir(ROOT)) == before
    weights = {}
    for method, seed in jobs:
        checkpoint = load(tmp_path / f"{method} {seed}")
        assert checkpoint["command"][checkpoint["command"].index("--seed") + 1] == str(seed)
        weights.setdefault(seed, []).append(checkpoint["model"])
    for same in weights.values():
        assert all(torch.equal(weight, same[0][name]) for other in same for name, weight in other.items())
    assert not torch.equal(weights[1][0]["0.weight"], weights[2][0]["0.weight"])
