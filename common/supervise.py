"""Runs a job's launcher and answers for its end. Every run.sh starts its launcher through it:

    python3 common/supervise.py torchrun ... main.py ...

- Wrong input (refuse() in errors.py) is said once, and the status is 2; the launcher's report about it is not shown.
- Ctrl-C, SIGTERM and SIGHUP end all of the job's processes, and one line says how to go on.
- A launcher that stays when its processes are gone and none has finished is ended: torchrun would wait for minutes
  where it cannot reach the machine that all meet at.
- However the job ends, none of its processes and none of its temporary files stay behind.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import psutil
except ImportError:
    sys.exit("error: psutil is missing in this environment: bash run_all.sh sets one up, or pip install psutil")

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of <linux/prctl.h>
PATIENCE = 45  # seconds; torchrun takes up to 30 to start again without a machine that is gone (choose_rendezvous)
prctl = ctypes.CDLL(None).prctl


def main(command):
    if not shutil.which(command[0]):
        print(f"error: there is no {command[0]} in this environment: bash run_all.sh sets one up", file=sys.stderr)
        return 2
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # a process whose parent is gone becomes this one's child, and so can be found
    # Signals are waited for, not handled, so that none can come between two steps. nohup's ignored one stays ignored.
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    stops = {stop for stop in stops if signal.getsignal(stop) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops | {signal.SIGCHLD})

    def prepare():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # if this process is killed, the launcher ends the job

    # The loaders' workers make sockets in it, whose paths may have 107 letters, some 45 of which are added.
    above = None if len(tempfile.gettempdir()) < 60 else "/tmp"
    with tempfile.TemporaryDirectory(prefix="job.", dir=above) as folder:
        refusal, unfinished, stop = Path(folder, "refusal"), Path(folder, "unfinished"), None
        env = os.environ | {"TMPDIR": folder, "REFUSAL_FILE": str(refusal)}
        # What the killed have left is cleared away by multiprocessing's tracker, which need not warn of it.
        quiet = "ignore:resource_tracker:UserWarning"
        env["PYTHONWARNINGS"] = f"{env['PYTHONWARNINGS']},{quiet}" if env.get("PYTHONWARNINGS") else quiet
        # In a session of its own: a terminal's Ctrl-C comes to this process only.
        launcher = subprocess.Popen(command, env=env, preexec_fn=prepare, start_new_session=True)
        last_seen, lost = time.monotonic(), False
        while launcher.poll() is None and not stop and not lost and not refusal.exists():
            got = signal.sigtimedwait(stops | {signal.SIGCHLD}, 0.1)
            stop = got.si_signo if got and got.si_signo in stops else None
            if time.monotonic() > last_seen + 2:  # not always: on a large machine looking takes a while
                if at_work(launcher) or not unfinished.exists():
                    last_seen = time.monotonic()
                lost = time.monotonic() > last_seen + PATIENCE
        end(launcher)
        error = refusal.read_text(encoding="utf-8") if refusal.exists() else None

    if error:
        print(error, file=sys.stderr)
        return 2
    if stop:
        print(f"stopped by {signal.Signals(stop).name}: --resume goes on from the last finished epoch", file=sys.stderr)
        signal.signal(stop, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {stop})
        os.kill(os.getpid(), stop)  # ends as one that was stopped, so that a script which waits for it stops too
    if lost:
        print(f"error: {command[0]}'s processes have failed, and it waits for another machine", file=sys.stderr)
        return 1
    if launcher.returncode < 0:
        print(f"error: {command[0]} was ended by {signal.Signals(-launcher.returncode).name}", file=sys.stderr)
        return 128 - launcher.returncode
    return launcher.returncode


def at_work(launcher):
    """Returns whether the launcher has a process left; one that has ended and that it does not ask after is none."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != launcher.pid and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def end(launcher):
    """Ends what is left of the job."""
    me = psutil.Process()
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGSTOP)  # lest it report the deaths of its processes, or start new ones
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != launcher.pid:
                process.terminate()
                process.resume()  # one that is stopped would not notice
    if launcher.poll() is None:
        launcher.kill()
        launcher.wait()
    psutil.wait_procs(me.children(recursive=True), timeout=5)
    while left := me.children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
