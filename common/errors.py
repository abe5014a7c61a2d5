"""How a run ends that cannot go on: by one line that says why, not by a traceback from each of its processes."""

import argparse
import contextlib
import functools
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: default arguments (group.WORLD) would keep it alive
import torch.multiprocessing as mp


class BrokenFile(Exception):
    """A data file that cannot be read. Raised in a loader's worker; the DataLoader raises it again in its process."""


def refuse(message, alone=False):
    """Ends this process with status 2 and `error: <message>` on stderr, which no other process of the job repeats.

    Usually all processes find the same fault at about the same time. Under run.sh they hand the line to supervise.py,
    which prints the first one and ends the job. Without it the process with local rank 0 prints, and the others wait:
    a launcher ends all processes when the first one exits, and the line should be out by then.
    alone: no other process knows of the fault; this one prints, whatever its rank.
    """
    line = f"error: {message}".replace("\n", " ")
    if hand_over(line):
        time.sleep(10)  # supervise.py ends this process
    elif alone or local_rank() == 0:
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(5)
    sys.exit(2)


def require(condition, message):
    """Refuses to go on unless the condition holds."""
    if not condition:
        refuse(message)


def supervised():
    """Returns whether this process has a supervise.py on this machine."""
    return "REFUSAL_FILE" in os.environ and Path(os.environ["REFUSAL_FILE"]).parent.is_dir()


def hand_over(line):
    """Leaves supervise.py the line, unless another has been left; returns whether there is a supervise.py."""
    if not supervised():
        return False
    file = os.environ["REFUSAL_FILE"]
    aside = Path(f"{file}.{os.getpid()}")
    aside.write_text(line, encoding="utf-8", errors="backslashreplace")
    with contextlib.suppress(FileExistsError):
        os.link(aside, file)  # all of it or nothing
    return True


@contextlib.contextmanager
def marked_unfinished():
    """Within it, and after an error in it, supervise.py finds a file that says so."""
    file = Path(os.environ["REFUSAL_FILE"]).with_name("unfinished") if supervised() else None
    if file:
        file.touch()
    yield
    if file:
        file.unlink(missing_ok=True)


def note(message):
    """Prints a line on stderr, once on each machine."""
    if local_rank() == 0:
        print(f"note: {message}", file=sys.stderr, flush=True)


def some(names):
    """Returns the first few of the names as text."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def local_rank():
    return int(os.environ.get("LOCAL_RANK", os.environ.get("HOROVOD_LOCAL_RANK", 0)))


def one_line_errors(main):
    """Decorator of a process's main function: what can be said in one line about its end is not said by a traceback."""

    @functools.wraps(main)
    def wrapper(*args):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name may have letters that the terminal has not
        if "PROBE_STEPS" in os.environ:  # run_all.sh --bench or --timeline looks on
            import common.probe  # noqa: F401
        try:
            try:
                with marked_unfinished():
                    return main(*args)
            finally:  # on the way out, a second Ctrl-C or the end of a loader's worker is no news
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except BrokenFile as error:  # from a worker, it comes with the worker's traceback
            refuse(str(error).strip().split(f"{BrokenFile.__name__}: ")[-1], alone=True)
        except KeyboardInterrupt:
            if local_rank() == 0:
                print("stopped: --resume goes on from the last finished epoch", file=sys.stderr, flush=True)
            sys.exit(130)
        except mp.ProcessExitedException as error:  # that process has said why, if it could
            sys.exit(2 if error.exit_code == 2 else f"error: {error}")
        except (RuntimeError, ConnectionResetError, ConnectionRefusedError, EOFError) as error:
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]  # its first sentence
            if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun finds a port by itself
                require("EADDRINUSE" not in str(error), f"the port to meet at is taken: {reason}")
            if not isinstance(error, RuntimeError):
                reason = f"DataLoader worker is gone ({reason or type(error).__name__})"
            elif "DataLoader worker" not in reason:  # which has been killed
                if not is_loss_of_contact(error):
                    raise
                reason = f"another process is gone, or did not answer within --timeout ({reason})"
            rank = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", local_rank()))
            print(f"error: process {rank}: {reason}", file=sys.stderr, flush=True)
            sys.exit(1)

    return wrapper


def is_loss_of_contact(error):
    """NCCL's, the store's and Horovod's errors have types of their own, gloo's begin with a source file of gloo's."""
    horovod = type(error).__name__ == "HorovodInternalError"
    return horovod or isinstance(error, dist.DistError) or "gloo/" in str(error)


def number(low, high=math.inf):
    """Returns a type for argparse: finite numbers of low's own type, int or float, from low to high."""

    def parse(text):
        try:
            value = type(low)(text)
        except ValueError:
            kind = "an integer" if type(low) is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None
        if not (low <= value <= high and math.isfinite(value)):
            wanted = f"{low} or more" if high == math.inf else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"{text} is out of range, which is {wanted}")
        return value

    return parse


def address(url):
    """A type for argparse: returns the host and the port of tcp://HOST:PORT."""
    found = re.fullmatch(r"tcp://(\[.+\]|[^:/\[\]]+):(\d{1,5})", url)
    if not found or int(found[2]) > 65535:
        raise argparse.ArgumentTypeError(f"{url!r} is not of the form tcp://HOST:PORT")
    return found[1].strip("[]"), int(found[2])


def check_start(args, cuda, docstring):
    """Refuses what can be seen before the processes meet: from then on one that ends would leave the others waiting.

    args: the script's options. cuda: whether each process is to have a GPU. docstring: the script's, for its launcher.
    """
    check_launcher(docstring)
    if "HOROVOD_RANK" in os.environ:
        for name, share in (("GLOO_TIMEOUT", 1), ("STALL_CHECK_TIME", 4), ("STALL_SHUTDOWN_TIME", 4)):  # 4 checks
            os.environ.setdefault(f"HOROVOD_{name}_SECONDS", str(max(1, args.timeout // share)))
    if hasattr(args, "world_size"):  # numbers of machines, not of processes; torchrun checks its own
        require(args.rank < args.world_size, f"--rank: must be less than {args.world_size} (--world-size)")
        require(args.world_size == 1 or args.dist_url[1] > 0, "--dist-url: must be that of the first of the machines")
    processes = getattr(args, "nprocs", os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("HOROVOD_LOCAL_SIZE", 1)))
    gpus = torch.cuda.device_count()
    require(not cuda or int(processes) <= gpus, f"{processes} processes, but only {gpus} GPUs, on this machine")
    if args.compile:  # which writes C++ and has it compiled, with Python's headers
        headers = Path(sysconfig.get_path("include"), "Python.h").exists()
        found = headers and shutil.which(os.environ.get("CXX", "g++"))
        require(found, "--compile: needs g++ and Python's headers. Debian and Ubuntu: apt-get install g++ python3-dev")
    if args.evaluate:
        weights = args.resume is not None or args.pretrained
        require(weights, "--evaluate: of which weights? Add --resume, --resume FILE or --pretrained")
    elif int(getattr(args, "rank", os.environ.get("RANK", os.environ.get("HOROVOD_RANK", 0)))) == 0:
        check_output(args.output)  # this one writes


def check_launcher(docstring):
    """Refuses another launcher than that of the docstring's first command: it starts too many processes, or too few."""
    command = re.search(r"^    (.*)$", docstring, re.MULTILINE)[1]
    wanted, found = command.split()[0], "python3"
    others = {"torchrun": {"RANK"}, "horovodrun": {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}}  # srun's, MPI's
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found = "torchrun"
    elif "HOROVOD_RANK" in os.environ:
        found = "horovodrun"
    elif os.environ.keys() & others.get(wanted, set()):
        found = wanted
    script = Path(sys.argv[0])
    run = script.with_name("run.sh")
    require(found == wanted, f"{script} is to be started by {wanted}, not by {found}: bash {run}, or {command}")


def check_output(output):
    """Refuses a folder that cannot be written to: now, not after the first epoch. Makes nothing yet."""
    folder = output.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refuse(f"--output: cannot write to {output}: {error.strerror}: {folder}")
