"""Watches a training process from within, for run_all.sh --bench and --timeline.

Where PROBE_STEPS is set, errors.py imports it into every process of a main.py, so that no main.py needs a line for it:

    PROBE_STEPS   after that many steps the process tells bench.py how long they took, and waits in memory for its turn:
                  for bench.py to answer how many steps to take, or to hang up, which ends the process
    PROBE_PORT    where bench.py listens
    PROBE_TRACE   if set, the process ends after PROBE_STEPS steps, and the last so many of them are profiled instead:
    PROBE_FOLDER  gets <rank>.trace.json, for Perfetto or TensorBoard
    PROBE_SLOW    the rank that takes half as long again for each forward pass, when profiled
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

STEPS, TRACED = int(os.environ["PROBE_STEPS"]), int(os.environ.get("PROBE_TRACE", 0))
marks, waits = [], []  # of this turn: the ends of its steps, and what each waited for communication, in seconds
turn = {"marks": STEPS}  # so many are a turn
wrapped = []  # the modules that are DistributedDataParallel's
depth = {"step": 0}  # Horovod's optimizer calls SGD's step in its own


def rank():
    return int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", os.environ.get("LOCAL_RANK", 0))))


def mark():
    event = None
    if torch.cuda.is_available():
        if not marks:  # later ones are timed by the GPU itself, which need not be waited for
            torch.cuda.synchronize()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    marks.append((time.time(), event))


def before_step(optimizer, args, kwargs):
    depth["step"] += 1


def after_step(optimizer, args, kwargs):
    depth["step"] -= 1
    if depth["step"]:
        return
    mark()
    for model in wrapped:  # those of the step before
        times = model._get_ddp_logging_data()
        waits.append((times.get("backward_comm_time", 0) - times.get("backward_compute_comm_overlap_time", 0)) / 1e9)
    if len(marks) == turn["marks"] and not TRACED:
        end_turn()


def end_turn():
    """Tells bench.py this turn's figures and waits for the next one; without one ends the process, as exit() would."""
    seconds = [at for at, _ in marks]
    memory = {"memory": int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        seconds = [seconds[0] + marks[0][1].elapsed_time(event) / 1000 for _, event in marks]
        memory["gpu_memory"] = torch.cuda.max_memory_allocated()
    if "bench" not in turn:  # not before: the loaders' processes would have it, too, and keep it open
        turn["bench"] = socket.create_connection(("127.0.0.1", int(os.environ["PROBE_PORT"]))).makefile("rw")
    print(json.dumps({"marks": seconds, "waits": waits, **memory}), file=turn["bench"], flush=True)
    steps = turn["bench"].readline()
    if not steps:
        sys.exit(0)
    turn["marks"] = 1 + int(steps)
    marks.clear()
    waits.clear()
    mark()  # the start


def watch_ddp(init):
    def wrapper(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._set_ddp_runtime_logging_sample_rate(1)
        wrapped.append(self)

    return wrapper


def watch_horovod(synchronize):
    def wrapper(self):
        start = time.perf_counter()
        with record_function("wait"):
            synchronize(self)
        waits.append(time.perf_counter() - start)

    return wrapper


def watch_data(fetch):
    def wrapper(self):
        wait_for_gpu()
        if marks:  # not in after_step, where the optimizer's span is still open
            profile.step()
        if len(marks) == STEPS:
            sys.exit(0)
        batch = fetch(self)
        after_data["time"] = time.perf_counter()
        return batch

    return wrapper


def watch_backward(backward):
    def wrapper(self, *args, **kwargs):
        wait_for_gpu()  # a phase's time is then that of its own kernels
        if os.environ.get("PROBE_SLOW") == str(rank()):
            with record_function("slow rank"):
                time.sleep((time.perf_counter() - after_data["time"]) / 2)
        with record_function("backward"):
            backward(self, *args, **kwargs)
            wait_for_gpu()

    return wrapper


def wait_for_gpu():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
DistributedDataParallel.__init__ = watch_ddp(DistributedDataParallel.__init__)
if "horovod.torch" in sys.modules:
    optimizer = sys.modules["horovod.torch.optimizer"]._DistributedOptimizer
    optimizer.synchronize = watch_horovod(optimizer.synchronize)
profile = None
if TRACED:
    after_data = {}
    torch.utils.data.dataloader._BaseDataLoaderIter.__next__ = watch_data(
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    )
    torch.Tensor.backward = watch_backward(torch.Tensor.backward)
    profile = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=STEPS - TRACED, active=TRACED),
        on_trace_ready=lambda profile: profile.export_chrome_trace(f"{os.environ['PROBE_FOLDER']}/{rank()}.trace.json"),
    )
    profile.start()
