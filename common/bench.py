"""The race of run_all.sh --bench:

    python3 common/bench.py RUNS [--rounds N] [options of main.py]

Every method with 1 and with N processes (nn.DataParallel: one process, on 1 and on N GPUs) on synthetic images, beside
the limit: bare.py's forward, backward, step and nothing else. With --data DIR also on its files, beside the limit that
decoding.py finds. Each round starts all of them one after another, so that a machine that gets slower or faster does so
for all. Prints a table and writes bench.md, bench.png and bench.json into RUNS. Ends with status 1 if a method did not
run.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torchvision

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from common import report
from common.data import build_datasets
from common.errors import number, refuse, require
from common.model import check_model

FILES = " from files"
WARM_UP = 3  # steps: they allocate, DDP rebuilds its buckets, and the loaders have just started
LABELS = {"bare": "limit: the bare loop", "decoding": "limit: decoding alone", **report.NAMES}
if not importlib.util.find_spec("apex"):  # as 04_apex/run.sh does, more carefully
    LABELS["04_apex"] = "torch.amp (04, no Apex)"
COLUMNS = [
    "method",
    "processes",
    "images/s",
    "min-max",
    "of the limit",
    "of one bare process",
    "scaling",
    "first step, s",
    "memory, MB",
    "waiting, %",
]
LEGEND = """
- images/s: the median step of all rounds after {warm_up} steps of warm-up{more}; min-max: the rounds' medians.
- of the limit: of the bare loop with as many processes{files}. That computes in 32 bits: 04 may exceed it.
- of one bare process: with {what}.
- scaling: N processes, of N times one process that has {share}.
- first step: seconds from the launch to the end of the first step. Memory: the largest process's peak{gpu}.
- waiting: the share of a step that a process waits for the gradients of others (for slower ones, too).
"""


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.error = refuse
    add = parser.add_argument
    add("runs", type=Path)
    add("--rounds", type=number(1), default=2)
    add("--steps", type=number(1), default=5, help="that count, of each run")
    add("--data", help="a folder of images, on which the methods are timed, too")
    add("--arch", default="resnet18")
    add("--image-size", type=number(1), default=128)
    add("--batch-size", type=number(1), default=64)
    add("--workers", type=number(1), default=2)
    args, others = parser.parse_known_args()
    args.pretrained = args.evaluate = False
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    count = int(os.environ.get("NPROC") or gpus or min(4, cores))
    check_model(args, max(1, args.batch_size // count))
    options = ["--arch", args.arch, "--image-size", args.image_size, "--batch-size", args.batch_size]
    options += ["--workers", args.workers, *others]
    racers = list_racers(args, options, count, cores)

    results, failures = {racer: [] for racer in racers}, {}
    start = time.monotonic()
    for turn in range(args.rounds):
        for racer, command in racers.items():
            if racer in failures:
                continue
            print(f"\rround {turn + 1}/{args.rounds}  {' '.join(map(str, racer))}".ljust(60), end="", flush=True)
            try:
                results[racer].append(run(command, racer, args, cores))
            except RuntimeError as error:
                print("\r".ljust(60), end="\r", flush=True)
                require(racer[0] != "02_distributed", error)  # the options' fault, which others would only repeat
                failures[racer] = str(error)
    print("\r".ljust(60), end="\r")
    figures = {racer: summary(rounds, args.batch_size) for racer, rounds in results.items() if rounds}
    rows = [row(racer, figures, failures) for racer in racers]
    share = "a GPU of its own" if gpus else "as many cores as all N together, so that 1/N is all there is to get"
    words = (
        {"what": "one GPU", "gpu": ", and its GPU's"} if gpus else {"what": "all of this machine's cores", "gpu": ""}
    )
    words["files"] = "; from files: of the lower of decoding and the method on synthetic images" if args.data else ""
    words["more"] = f" (from files {warm_up(args, FILES)})" if args.data else ""
    legend = LEGEND.format(warm_up=WARM_UP, share=share, **words)
    machine = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{cores} cores, no GPU"
    setting = f"{' '.join(map(str, options))}; {args.rounds} rounds of {args.steps} steps; {machine}; "
    setting += f"Python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}"
    print(report.text_table(rows, COLUMNS), legend, setting, sep="\n")
    args.runs.mkdir(parents=True, exist_ok=True)
    markdown = report.markdown_table(rows, COLUMNS)
    (args.runs / "bench.md").write_text(f"{markdown}{legend}\n{setting}\n\n![images per second](bench.png)\n")
    data = {" x ".join(map(str, racer[:2])) + racer[2]: figure for racer, figure in figures.items()}
    (args.runs / "bench.json").write_text(json.dumps({"setting": setting, "figures": data}, indent=1))
    draw(figures, args.runs / "bench.png")
    print(f"\n{time.monotonic() - start:.0f} s. {args.runs / 'bench.md'}, bench.png, bench.json")
    sys.exit(bool(failures))


def list_racers(args, options, count, cores):
    """Returns the commands by (method, number of processes, "" for synthetic images or FILES)."""
    racers = {}
    for processes in sorted({1, count}):
        launcher = ["torchrun", "--standalone", f"--nproc_per_node={processes}"]
        shape = [args.arch, args.image_size, args.batch_size]
        racers["bare", processes, ""] = [*launcher, ROOT / "common" / "bare.py", *shape]
        for method in report.NAMES:
            if method != "01_dataparallel" or processes == 1 or torch.cuda.is_available():
                racers[method, processes, ""] = ["bash", ROOT / method / "run.sh", "--data", "fake", *options]
    if args.data:
        train_set, _ = build_datasets(args.data, args.image_size)
        wanted = (warm_up(args, FILES) + args.steps) * args.batch_size
        require(len(train_set) >= wanted, f"--data: {len(train_set)} images for training; the race needs {wanted}")
        shape = [args.data, args.image_size, args.batch_size, cores, warm_up(args, FILES) + args.steps]
        racers["decoding", cores, FILES] = ["python3", ROOT / "common" / "decoding.py", *shape]
        for method in report.NAMES:
            processes = 1 if method == "01_dataparallel" and not torch.cuda.is_available() else count
            racers[method, processes, FILES] = ["bash", ROOT / method / "run.sh", "--data", args.data, *options]
    return racers


def warm_up(args, source):
    """Returns the number of steps that do not count: with files, not those whose images were ready before the first."""
    return WARM_UP + 2 * args.workers if source == FILES else WARM_UP


def run(command, racer, args, cores):
    """Returns the probes' figures, one per process; of decoding alone, images per second."""
    method, processes, source = racer
    with tempfile.TemporaryDirectory() as folder:
        launch = time.time()
        printed = start_probed(command, folder, processes, cores, PROBE_STEPS=warm_up(args, source) + args.steps)
        if method == "decoding":
            return float(printed)
        files = sorted(Path(folder).glob("[0-9]*.json"))
        if not files:
            raise RuntimeError("it took no steps")
        return [json.loads(file.read_text()) | {"launch": launch, "steps": args.steps} for file in files]


def start_probed(command, folder, processes, cores, **env):
    """Runs a command with probe.py in its processes, and returns what it printed. RuntimeError says why it failed."""
    env = {name: str(value) for name, value in env.items()} | {"PROBE": str(folder), "NPROC": str(processes)}
    env["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    command = [str(part) for part in command]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [f"status {done.returncode}"]
        raise RuntimeError(lines[0].partition("rror: ")[2] or lines[0])
    return done.stdout


def summary(rounds, batch_size):
    """rounds: of each run the figures of its processes. Returns the medians that the table shows."""
    if isinstance(rounds[0], float):
        return {"images_per_second": median(rounds), "rounds": rounds}
    steps, waits = [], []
    for run in rounds:
        count = run[0]["steps"]
        ends = [max(times) for times in zip(*(process["ends"] for process in run))][-count - 1 :]
        steps.append([after - before for before, after in pairwise(ends)])
        waits += [median(process["waits"][-count:]) for process in run if process["waits"]]
    step = median(time for times in steps for time in times)
    return {
        "images_per_second": batch_size / step,
        "rounds": [batch_size / median(times) for times in steps],
        "first_step": median(max(process["ends"][0] - process["launch"] for process in run) for run in rounds),
        "memory": median(max(process["memory"] for process in run) for run in rounds),
        "gpu_memory": median(max(process.get("gpu_memory", 0) for process in run) for run in rounds),
        "waiting": median(waits) / step if waits else None,
    }


def row(racer, figures, failures):
    """Returns the table's line for a racer, as texts."""
    method, processes, source = racer
    label = LABELS[method] + (source if method != "decoding" else "")
    if racer in failures:
        return [label, str(processes), *["-"] * 7, failures[racer]]
    figure = figures[racer]
    speed, rounds = figure["images_per_second"], figure["rounds"]
    cells = [label, str(processes), f"{speed:,.1f}", f"{min(rounds):,.1f}-{max(rounds):,.1f}"]
    if method == "decoding":
        return [*cells, *["-"] * 6]

    def ratio(*others, times=1):
        if not all(other in figures for other in others):
            return "-"
        return f"{speed / times / min(figures[other]['images_per_second'] for other in others):.2f}"

    limits = [("bare", processes, "")]
    if source == FILES:
        limits = [racer for racer in figures if racer[0] == "decoding"] + [(method, processes, "")]
    waits = processes > 1 and figure["waiting"] is not None
    return [
        *cells,
        ratio(*limits),
        ratio(("bare", 1, "")),
        ratio((method, 1, ""), times=processes) if processes > 1 and not source else "-",
        f"{figure['first_step']:.1f}",
        " + ".join(f"{figure[kind] / 1e6:,.0f}" for kind in ("memory", "gpu_memory") if figure[kind]),
        f"{100 * figure['waiting']:.0f}" if waits else "-",
    ]


def draw(figures, path):
    """Draws a bar for each run, with its rounds' range; hatches tell the numbers of processes apart in grey prints."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figures = {racer: figure for racer, figure in figures.items() if racer[0] != "decoding"}  # too high to be shown
    counts = sorted({processes for _, processes, _ in figures})
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(figures) + 1.2), layout="constrained")
    for place, ((_, processes, _), result) in enumerate(figures.items()):
        speed, rounds = result["images_per_second"], result["rounds"]
        reach = [[max(0, speed - min(rounds))], [max(0, max(rounds) - speed)]]
        kind = counts.index(processes)
        style = {"color": ["#9ecae1", "#2171b5"][kind], "hatch": ["", "//"][kind], "edgecolor": "white"}
        axes.barh(place, speed, xerr=reach, capsize=3, **style)
        box = {"fc": "white", "pad": 1, "lw": 0}
        axes.text(speed * 0.02, place, f"{speed:,.1f}", va="center", weight="bold", bbox=box)
    plural = {1: "process"}
    names = [f"{LABELS[method]}{source}, {n} {plural.get(n, 'processes')}" for method, n, source in figures]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("training speed, images per second: median, and range of the rounds")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
