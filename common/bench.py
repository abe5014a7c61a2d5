"""The race of run_all.sh --bench:

    python3 common/bench.py RUNS [--rounds N] [options of main.py]

Every method with 1 and with N processes, beside the limit: bare.py's forward, backward, step and nothing else. Each
round starts all of them one after another, so that a machine that gets slower or faster does so for all. Prints a table
and writes RUNS/bench.md, bench.png and bench.json. Ends with status 1 if a method did not run.
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
from pathlib import Path
from statistics import median

import report
import torch
import torchvision

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 2  # steps: the first allocates, the second follows the rebuilding of DDP's buckets
LABELS = {"bare": "limit: the bare loop", **report.NAMES}
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
- images/s: the median step of all rounds after {warm_up} steps of warm-up; min-max: the rounds' medians.
- of the limit: of the bare loop with as many processes. Of one bare process: with all of this machine's {what}.
- scaling: N processes, of N times one process that has {share}.
- first step: seconds from the launch to the end of the first step. Memory: the largest process's peak{gpu}.
- waiting: the share of a step that a process waits for the gradients of others (for slower ones, too).
"""


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="that count, of each run")
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    args, others = parser.parse_known_args()
    gpus = torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0))
    count = int(os.environ.get("NPROC") or gpus or min(4, cores))
    shape = [args.arch, str(args.image_size), str(args.batch_size)]
    options = ["--data", "fake", "--arch", args.arch, "--image-size", args.image_size, "--batch-size", args.batch_size]

    racers = {}  # (method, processes): the command, or None where there is none
    for processes in sorted({1, count}):
        launcher = ["torchrun", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else ["python3"]
        racers["bare", processes] = [*launcher, ROOT / "common" / "bare.py", *shape]
        for method in report.NAMES:
            if method != "01_dataparallel" or processes == 1:
                racers[method, processes] = ["bash", ROOT / method / "run.sh", *options, *others]
    results = {racer: [] for racer in racers}
    failures = {}
    start = time.monotonic()
    for number in range(args.rounds):
        for racer, command in racers.items():
            if racer in failures:
                continue
            print(f"\rround {number + 1}/{args.rounds}  {racer[0]} x {racer[1]}".ljust(60), end="", flush=True)
            try:
                results[racer].append(run(command, racer[1], cores, WARM_UP + args.steps))
            except RuntimeError as error:
                failures[racer] = str(error)
    print("\r".ljust(60))
    figures = {racer: summary(rounds, args.batch_size) for racer, rounds in results.items() if rounds}
    rows = [row(racer, figures, failures, count) for racer in racers]
    share = "a GPU of its own" if gpus else "as many cores as all N together, so that 1/N is all there is to get"
    words = {"what": "GPU", "gpu": ", and its GPU's"} if gpus else {"what": "cores", "gpu": ""}
    legend = LEGEND.format(warm_up=WARM_UP, share=share, **words)
    machine = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{cores} cores, no GPU"
    setting = f"{' '.join(map(str, options + others))}; {args.rounds} rounds of {args.steps} steps; {machine}; "
    setting += f"Python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}"
    print(report.text_table(rows, COLUMNS), legend, setting, sep="\n")
    args.runs.mkdir(parents=True, exist_ok=True)
    markdown = report.markdown_table(rows, COLUMNS)
    (args.runs / "bench.md").write_text(f"{markdown}{legend}\n{setting}\n\n![images per second](bench.png)\n")
    data = {f"{method} x {processes}": figure for (method, processes), figure in figures.items()}
    (args.runs / "bench.json").write_text(json.dumps({"setting": setting, "figures": data}, indent=1))
    draw(figures, args.runs / "bench.png")
    print(f"\n{time.monotonic() - start:.0f} s. {args.runs / 'bench.md'}, bench.png, bench.json")
    sys.exit(bool(failures))


def run(command, processes, cores, steps):
    """Returns the probes' figures, one per process. RuntimeError says why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PROBE": folder, "PROBE_STEPS": str(steps), "NPROC": str(processes)}
        env["OMP_NUM_THREADS"] = str(max(1, cores // processes))
        launch = time.time()
        command = [str(part) for part in command]
        done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        files = sorted(Path(folder).glob("[0-9]*.json"))
        if done.returncode or not files:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["it took no steps"]
            raise RuntimeError(lines[0].partition("rror: ")[2] or lines[0])
        return [json.loads(file.read_text()) | {"launch": launch} for file in files]


def summary(rounds, batch_size):
    """rounds: of each run the figures of its processes. Returns the medians that the table shows."""
    steps, waits = [], []
    for processes in rounds:
        ends = [max(times) for times in zip(*(process["ends"] for process in processes))]
        steps.append([after - before for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:])])
        waits += [median(process["waits"][WARM_UP:]) for process in processes if process["waits"]]
    step = median(time for times in steps for time in times)
    return {
        "images_per_second": batch_size / step,
        "rounds": [batch_size / median(times) for times in steps],
        "first_step": median(max(process["ends"][0] - process["launch"] for process in run) for run in rounds),
        "memory": median(max(process["memory"] for process in run) for run in rounds),
        "gpu_memory": median(max(process.get("gpu_memory", 0) for process in run) for run in rounds),
        "waiting": median(waits) / step if waits else None,
    }


def row(racer, figures, failures, count):
    method, processes = racer
    if racer in failures:
        return [LABELS[method], str(processes), *["-"] * 7, failures[racer]]
    figure = figures[racer]
    speed, rounds = figure["images_per_second"], figure["rounds"]

    def ratio(other, times=1):
        return f"{speed / times / figures[other]['images_per_second']:.2f}" if other in figures else "-"

    memory = " + ".join(f"{figure[kind] / 1e6:,.0f}" for kind in ("memory", "gpu_memory") if figure[kind])
    return [
        LABELS[method],
        str(processes),
        f"{speed:,.1f}",
        f"{min(rounds):,.1f}-{max(rounds):,.1f}",
        ratio(("bare", processes)),
        ratio(("bare", 1)),
        ratio((method, 1), processes) if processes > 1 else "-",
        f"{figure['first_step']:.1f}",
        memory,
        "-" if processes == 1 or figure["waiting"] is None else f"{100 * figure['waiting']:.0f}",
    ]


def draw(figures, path):
    """Draws a bar for each run, with its rounds' range; hatches tell the numbers of processes apart in grey prints."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    counts = sorted({processes for _, processes in figures})
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(figures) + 1.2), layout="constrained")
    for place, ((_, processes), result) in enumerate(figures.items()):
        speed, rounds = result["images_per_second"], result["rounds"]
        reach = [[max(0, speed - min(rounds))], [max(0, max(rounds) - speed)]]
        kind = counts.index(processes)
        style = {"color": ["#9ecae1", "#2171b5"][kind], "hatch": ["", "//"][kind], "edgecolor": "white"}
        axes.barh(place, speed, xerr=reach, capsize=3, **style)
        box = {"fc": "white", "pad": 1, "lw": 0}
        axes.text(speed * 0.02, place, f"{speed:,.1f}", va="center", weight="bold", bbox=box)
    plural = {1: "process"}
    names = [f"{LABELS[method]}, {n} {plural.get(n, 'processes')}" for method, n in figures]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("training speed, images per second: median, and range of the rounds")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
