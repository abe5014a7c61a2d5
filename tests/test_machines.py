"""Two machines: by hand, by ssh, by Slurm; restarts, and what becomes of a job when the network goes.

The machines are lab.py's: two network namespaces of this one, with a cable, real sshd and real Slurm between them.
"""

import contextlib
import functools
import os
import re
import signal
import time

import pytest
import torch
from conftest import ROOT, ended, launch, load, metrics, ranks, started, train, wait_for, wait_until
from lab import HOSTS, Lab, missing

pytestmark = pytest.mark.machines
JOB = ["--epochs", 8, "--workers", 0]
ONE_THREAD = {"OMP_NUM_THREADS": 1}  # the two hosts share this machine's cores; and other sums round otherwise
ENDLESS = ["--epochs", 100_000, "--workers", 0]


@pytest.fixture
def lab(tmp_path):
    if why := missing():
        pytest.skip(why)
    (tmp_path / "lab").mkdir()
    with Lab(tmp_path / "lab") as lab:
        yield lab


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A function that returns the weights of JOB by two processes of a method on one host."""

    @functools.cache
    def weights(method):
        output = tmp_path_factory.mktemp("alone")
        train(method, *JOB, "--output", output, **ONE_THREAD)
        return load(output)["model"]

    return weights


@contextlib.contextmanager
def on_both(lab, method, output, *options, **env):
    """Starts one process on each host by the same command, but for NODE_RANK; `output` has {host} or is shared."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(on_one(lab, host, method, output, *options, **env)) for host in HOSTS]


def on_one(lab, host, method, output, *options, **env):
    env = {"NPROC": 1, "NNODES": 2, "NODE_RANK": list(HOSTS).index(host), "MASTER_ADDR": "hosta"} | ONE_THREAD | env
    command = lab.on(host, "bash", ROOT / method / "run.sh", "--output", str(output).format(host=host))
    return started(*command, *options, **env)


def equal(weights, others):
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def epochs_done(output):
    return len(metrics(output)) if (output / "metrics.jsonl").exists() else 0


# Training


@pytest.mark.parametrize("method", ["02_distributed", "03_multiprocessing", "04_apex"])
def test_two_hosts(method, lab, alone, tmp_path):
    """Each with a disk of its own: the first one's gets the results. 02's cable is cut for three seconds on the way."""
    with on_both(lab, method, tmp_path / "{host}", *JOB) as runs:
        wait_for(runs[0], "epoch 1  train loss")
        if method == "02_distributed":
            lab.cable("down")
            time.sleep(3)  # the fault, not a wait for something
            lab.cable("up")
        texts = [ended(run, 60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], texts
    assert "epoch" not in texts[1] and not (tmp_path / "hostb").exists()
    weights = load(tmp_path / "hosta")["model"]
    assert equal(weights, alone(method if method == "04_apex" else "02_distributed"))
    gradients = 8 * (1437 // 64) * 4 * sum(weight.numel() for weight in weights.values())  # epochs x steps x bytes
    assert all(lab.bytes_received(host) > gradients for host in HOSTS)


def test_horovod_by_ssh(lab, alone, tmp_path):
    lab.start_sshd()
    horovod = lab.on("hosta", "bash", ROOT / "05_horovod" / "run.sh", *JOB, "--output", tmp_path / "out")
    result = launch(*horovod, HOSTS="hosta:1,hostb:1", **ONE_THREAD, HOME=tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert equal(load(tmp_path / "out")["model"], alone("02_distributed"))
    assert lab.bytes_received("hostb") > 1_000_000


def test_restart_on_both(lab, alone, tmp_path):
    """A killed process on one host costs the epoch it was in, and nothing else."""
    out = tmp_path / "shared"
    with on_both(lab, "02_distributed", out, *JOB, MAX_RESTARTS=1) as runs:
        wait_until(lambda: epochs_done(out) >= 2)
        ranks(runs[1])[0].kill()
        texts = [ended(run, 90) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], texts
    assert f"resuming from {out}/last.pt" in "".join(texts)
    assert [line["epoch"] for line in metrics(out)] == list(range(1, 9))
    assert equal(load(out)["model"], alone("02_distributed"))


def test_sigterm_on_the_first_host_ends_both(lab, tmp_path):
    """With Horovod, the other one's processes were started by ssh; torchrun's notice that they are alone."""
    lab.start_sshd()
    horovod = lab.on("hosta", "bash", ROOT / "05_horovod" / "run.sh", *ENDLESS, "--output", tmp_path / "05")
    with (
        started(*horovod, HOSTS="hosta:1,hostb:1", **ONE_THREAD, HOME=tmp_path, cwd=tmp_path) as run,
        on_both(lab, "02_distributed", tmp_path / "02", *ENDLESS) as (first, second),
    ):
        wait_until(lambda: epochs_done(tmp_path / "05") and epochs_done(tmp_path / "02"))
        for each in (run, first):
            each.send_signal(signal.SIGTERM)
        assert "stopped by SIGTERM" in ended(run, 20) and "stopped by SIGTERM" in ended(first, 20)
        assert "error: process 1: another process is gone" in ended(second, 20)
    assert second.returncode == 1


# The network goes


@pytest.mark.parametrize(
    ("method", "restarts"), [("02_distributed", 0), ("02_distributed", 1), ("03_multiprocessing", 0)]
)
def test_cut(method, restarts, lab, tmp_path):
    out = tmp_path / "shared"
    with on_both(lab, method, out, *ENDLESS, "--timeout", 5, MAX_RESTARTS=restarts) as runs:
        wait_until(lambda: epochs_done(out) >= 1)
        lab.cable("down")
        start = time.monotonic()
        texts = [ended(run, 65 + start - time.monotonic()) for run in runs]
    for run, text in zip(runs, texts):
        assert run.returncode not in (0, 2)
        assert "another process is gone, or did not answer within --timeout" in text, text
    assert load(out)["epoch"] >= 1


def test_cut_of_horovod(lab, tmp_path):
    out = tmp_path / "shared"
    lab.start_sshd()
    horovod = lab.on("hosta", "bash", ROOT / "05_horovod" / "run.sh", *ENDLESS, "--timeout", 5, "--output", out)
    with started(*horovod, HOSTS="hosta:1,hostb:1", **ONE_THREAD, HOME=tmp_path, cwd=tmp_path) as run:
        wait_until(lambda: epochs_done(out) >= 1)
        lab.cable("down")
        text = ended(run, 65)
    assert run.returncode not in (0, 2)
    assert "another process is gone, or did not answer within --timeout" in text, text
    assert load(out)["epoch"] >= 1


def test_a_host_is_lost_and_comes_back(lab, tmp_path):
    """NNODES=1:2: the other one goes on alone, and takes it in again."""
    out = tmp_path / "shared"
    elastic = {"NNODES": "1:2", "MAX_RESTARTS": 2}

    def processes():
        return epochs_done(out) and metrics(out)[-1]["processes"]

    with on_one(lab, "hosta", "02_distributed", out, *ENDLESS, "--timeout", 5, **elastic) as first:
        with on_one(lab, "hostb", "02_distributed", out, *ENDLESS, "--timeout", 5, **elastic) as second:
            wait_until(lambda: processes() == 2)
            lab.cable("down")
            ended(second, 65)
            assert second.returncode not in (0, 2)
            wait_until(lambda: processes() == 1)
        lab.cable("up")
        with on_one(lab, "hostb", "02_distributed", out, *ENDLESS, "--timeout", 5, **elastic) as second:
            wait_until(lambda: processes() == 2, 120)
            for run in (first, second):
                run.send_signal(signal.SIGTERM)
            for run in (first, second):
                assert "stopped by SIGTERM" in ended(run, 20)
    assert [line["epoch"] for line in metrics(out)] == list(range(1, epochs_done(out) + 1))


# Slurm


@pytest.fixture
def slurm(lab, tmp_path):
    """A function that runs one of Slurm's commands on hosta, in the repository's folder; returns what it prints."""
    lab.start_sshd()  # first: Slurm's jobs see the /etc that its daemons have seen
    environment = lab.start_slurm()

    def run(*command, **env):
        result = launch(*lab.on("hosta", *command), cwd=ROOT, NPROC=1, **ONE_THREAD, **environment, **env)
        assert result.returncode == 0, result.output
        return result.output.strip()

    return run


def submitted(slurm, tmp_path, *options, **env):
    """Submits slurm.sh; returns the job's number and its log."""
    log = tmp_path / "job.log"
    command = ["sbatch", "--parsable", f"--output={log}", "02_distributed/slurm.sh", *options]
    job = slurm(*command, "--output", tmp_path / "out", **env)
    assert job.isdigit()
    return job, log


def state(slurm, job):
    """Returns the job's state; "" once it is forgotten."""
    return slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")


def test_slurm_job(slurm, alone, tmp_path):
    job, log = submitted(slurm, tmp_path, *JOB)
    wait_until(lambda: state(slurm, job) == "COMPLETED", 120)
    assert "processes: 2 (cpu, gloo)" in log.read_text()
    assert equal(load(tmp_path / "out")["model"], alone("02_distributed"))


def test_slurm_requeue_and_scancel(slurm, tmp_path):
    """Slurm's signal before the time limit makes the job requeue itself. (Slurm then waits two minutes: not here.)"""
    out = tmp_path / "out"
    job, log = submitted(slurm, tmp_path, *ENDLESS)
    wait_until(lambda: epochs_done(out) >= 1)
    slurm("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: state(slurm, job) == "PENDING", 30)
    done = epochs_done(out)
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now+3")  # not at once: its nodes have just revoked the job
    wait_until(lambda: epochs_done(out) > done)
    text = log.read_text()
    assert f"out of time: requeueing job {job}" in text and f"resuming from {out}/last.pt" in text
    slurm("scancel", job)
    wait_until(lambda: state(slurm, job) == "CANCELLED", 20)
    assert not any(str(out).encode() in line for _, line in command_lines())
    assert [line["epoch"] for line in metrics(out)] == list(range(1, epochs_done(out) + 1))


def command_lines():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            yield int(pid), file.read()


def test_srun_without_torchrun(slurm, alone, tmp_path):
    """The README's line, with one process on each node and no GPU."""
    script = """
        MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500 RANK=$SLURM_PROCID \\
        LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec python3 02_distributed/main.py "$@" """
    options = [*JOB, "--output", tmp_path / "out"]
    text = slurm("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", script, "_", *options)
    assert "processes: 2 (cpu, gloo)" in text
    assert equal(load(tmp_path / "out")["model"], alone("02_distributed"))


def test_horovod_under_slurm(slurm, alone, tmp_path):
    """The README's line, with one process on each node and no GPU."""
    out = tmp_path / "out"
    script = "HOSTS=$(scontrol show hostnames | sed 's/$/:1/' | paste -sd,) bash 05_horovod/run.sh"
    script += f" --epochs 8 --workers 0 --output {out}"
    job = slurm("sbatch", "--parsable", f"--output={tmp_path}/log", "--nodes=2", "--wrap", script, HOME=tmp_path)
    wait_until(lambda: state(slurm, job) not in ("PENDING", "RUNNING", "COMPLETING"), 120)
    assert state(slurm, job) == "COMPLETED", (tmp_path / "log").read_text()
    assert load(out)["history"][-1]["processes"] == 2
    assert equal(load(out)["model"], alone("02_distributed"))


def test_slurm_requeues_after_a_failure(slurm, tmp_path):
    """As often as MAX_RESTARTS says: here a torchrun is killed, which takes its processes with it."""
    out = tmp_path / "out"
    job, log = submitted(slurm, tmp_path, *ENDLESS, MAX_RESTARTS=1)
    wait_until(lambda: epochs_done(out) >= 1)
    lines = [(pid, line.split(b"\0")) for pid, line in command_lines() if str(out).encode() in line]
    torchruns = [pid for pid, words in lines if words[1].endswith(b"/torchrun")]
    assert len(torchruns) == 2
    os.kill(torchruns[1], signal.SIGKILL)
    wait_until(lambda: state(slurm, job) == "PENDING")
    assert re.search(f"status 1(37|43): requeueing job {job}", log.read_text())  # of the one, or of the other torchrun
