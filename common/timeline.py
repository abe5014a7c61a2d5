"""The pictures of run_all.sh --timeline, which show where the time of a step goes:

    python3 common/timeline.py RUNS [--slow-rank R] [options of main.py]

Profiles the last steps of a short run of every method, with a process for each GPU, or two on the CPU, and draws
RUNS/timeline/<method>.png: rank by rank, all pictures with the same time axis. The traces stay beside them, for
https://ui.perfetto.dev or TensorBoard. Ends with status 1 if a method did not run.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from common import report
from common.bench import LABELS, Job
from common.errors import number, refuse, require

STEPS, TRACED = 6, 2
ALL_REDUCE = "all-reduce of a bucket of gradients"
KINDS = {  # colour and hatch: light to dark, so that a grey print tells them apart
    "waiting for data": ("#ffffff", "xxx"),
    "forward": ("#c6dbef", ""),
    "backward": ("#6baed6", ""),
    "optimizer": ("#08519c", ""),
    "made slow on purpose": ("#fdd0a2", "..."),
    "waiting for gradients": ("#ffffff", "///"),
    ALL_REDUCE: ("#d94801", ""),
}


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("runs", type=Path)
    parser.add_argument("--slow-rank", type=number(0), help="this rank takes half as long again for its forward passes")
    args, options = parser.parse_known_args()
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    count = int(os.environ.get("NPROC") or gpus or 2)
    require(args.slow_rank is None or args.slow_rank < count, f"--slow-rank: there are ranks 0 to {count - 1} only")
    # resnet18's gradients, in a short step: what it takes to average them can be seen, also on a CPU
    options = ["--data", "fake", "--arch", "resnet18", "--image-size", "64", "--batch-size", "32", *options]
    folder = args.runs / "timeline"
    found, failures = {}, []
    for method in report.NAMES:
        print(f"{LABELS[method]} ...", flush=True)
        try:
            processes = 1 if method == "01_dataparallel" and not gpus else count  # 01's one takes so many GPUs
            trace(method, processes, args.slow_rank, folder / method, cores, options)
            found[method] = [read(file) for file in sorted((folder / method).glob("*.trace.json"))]
            if method == "05_horovod":  # its own thread does the exchanging, which only its own timeline shows
                found[method][0] += read_horovod(folder / method / "horovod.json", found[method][0])
        except RuntimeError as error:
            require(method != "01_dataparallel", error)  # the options' fault, which the others would only repeat
            failures.append(f"{LABELS[method]}: {error}")
    for method, ranks in found.items():
        start = min(span[1] for spans in ranks for span in spans)
        found[method] = [[(kind, begin - start, end - start) for kind, begin, end in spans] for spans in ranks]
    longest = max(span[2] for ranks in found.values() for spans in ranks for span in spans)
    machine = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{cores} cores, no GPU"
    for method, ranks in found.items():
        draw(LABELS[method], ranks, longest, f"{machine}, torch {torch.__version__}", folder / f"{method}.png")
    print("\n".join([*failures, f"{folder}: the pictures, and the traces for https://ui.perfetto.dev"]))
    sys.exit(bool(failures))


def trace(method, processes, slow_rank, folder, cores, options):
    """Leaves <rank>.trace.json in the folder, and Horovod's own horovod.json. RuntimeError says why there are none."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env = {"PROBE_STEPS": STEPS, "PROBE_TRACE": TRACED, "PROBE_FOLDER": folder}
    if method == "05_horovod":
        env["HOROVOD_TIMELINE"] = folder / "horovod.json"
    if slow_rank is not None and method != "01_dataparallel":  # one process has nobody to wait for it
        env["PROBE_SLOW"] = slow_rank
    Job(["bash", ROOT / method / "run.sh", *options], processes, cores, **env).end()
    if not list(folder.glob("*.trace.json")):
        raise RuntimeError("it took no steps")


def read(file):
    """Returns the spans of a rank's trace: (kind, start, end), in seconds since 1970."""
    trace = json.loads(file.read_text())
    origin = trace["baseTimeNanoseconds"] / 1e9
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    events = [(e["name"], e.get("cat"), origin + e["ts"] / 1e6, origin + (e["ts"] + e["dur"]) / 1e6) for e in events]
    events.sort(key=lambda event: event[2])
    spans, after_data = [], None
    # What a backward pass computes, on the GPU if there is one; after it the process waits for the others' gradients.
    kernels = [event for event in events if event[1] == "kernel" and "nccl" not in event[0].lower()]
    computing = kernels or [event for event in events if event[0].startswith("autograd::engine::evaluate_function")]
    for name, category, start, end in events:
        if name.startswith("enumerate(DataLoader)"):
            spans.append(("waiting for data", start, end))
            after_data = end
        elif name == "slow rank":
            spans.append(("made slow on purpose", start, end))
        elif name == "backward" and category == "user_annotation":
            last = max((event[3] for event in computing if start <= event[2] <= end), default=end)
            slow = [span for span in spans if span[0] == "made slow on purpose" and span[1] >= after_data]
            spans.append(("forward", after_data, slow[0][1] if slow else start))
            spans.append(("backward", start, min(last, end)))
            if last < end:
                spans.append(("waiting for gradients", last, end))
        elif name.startswith("Optimizer.step"):
            spans.append(("optimizer", start, end))
        elif name == "wait":  # in Horovod's step
            spans.append(("waiting for gradients", start, end))
        elif "all_reduce" in name.lower() or (category == "kernel" and "nccl" in name.lower()):
            spans.append((ALL_REDUCE, start, end))
    return spans


def read_horovod(file, spans):
    """Returns the all-reduces of rank 0, the only one whose timeline Horovod writes, during these spans."""
    events = json.loads(file.read_text().strip().rstrip(",]") + "]")
    (origin,) = [e["args"]["start_time_since_epoch_in_micros"] for e in events if "start_time" in str(e.get("args"))]
    first, last = min(span[1] for span in spans), max(span[2] for span in spans)
    open_events, found = {}, []
    for event in events:
        if event["ph"] == "B":
            open_events.setdefault(event["pid"], []).append(event)
        elif event["ph"] == "E":
            begun = open_events[event["pid"]].pop()
            start, end = ((origin + e["ts"]) / 1e6 for e in (begun, event))
            if begun["name"] == "ALLREDUCE" and first <= start <= last:
                if found and start < found[-1][2]:  # of another tensor in the same buffer
                    found[-1] = (ALL_REDUCE, found[-1][1], max(end, found[-1][2]))
                else:
                    found.append((ALL_REDUCE, start, end))
    return found


def draw(name, ranks, longest, machine, path):
    """Draws a method's ranks: what each computes or waits for, and below it the all-reduces that run meanwhile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.95 * len(ranks)), layout="constrained")
    for rank, spans in enumerate(ranks):
        buckets = [span for span in spans if span[0] == ALL_REDUCE]
        for kind, start, end in spans:
            place, height = rank, 0.4
            if kind == ALL_REDUCE:  # those that run at the same time below one another
                bucket = buckets.index((kind, start, end))
                place, height = rank + 0.42 + 0.12 * sum(s <= start < e for _, s, e in buckets[:bucket]), 0.1
            color, hatch = KINDS[kind]
            style = {"facecolor": color, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5, "align": "edge"}
            axes.barh(place, 1000 * (end - start), left=1000 * start, height=height, **style)
    axes.set_yticks([rank + 0.2 for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
    axes.set_ylim(len(ranks) - 0.25, -0.1)
    axes.set_xlim(0, 1000 * longest)
    axes.set_xlabel("time since the first of these steps began, milliseconds")
    axes.set_title(f"{name}, {TRACED} steps ({machine})", fontsize="medium")
    used = {kind for spans in ranks for kind, _, _ in spans}
    handles = [
        Patch(fc=fill, hatch=hatch, ec="black", lw=0.5, label=kind)
        for kind, (fill, hatch) in KINDS.items()
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main()
