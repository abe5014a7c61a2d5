"""The race of run_all.sh --bench:

    python3 common/bench.py RUNS [--rounds N] [--steps N] [options of main.py]

Every method with 1 and with N processes (nn.DataParallel: one process, on 1 and on N GPUs) on synthetic images, beside
the limit: bare.py's forward, backward, step and nothing else. With --data DIR also on its files, beside the limit that
decoding.py finds. Without GPUs, all that have the same number of processes are held in memory together, and take turns
of one step (with --data four): a machine that gets slower or faster does so for all. On GPUs, or if memory is too short
for that, each is started anew for each turn. Prints a table; writes bench.md, bench.png and bench.json into RUNS. Ends
with status 1 if a method did not run.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, stdev

import psutil
import torch
import torchvision

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from common import report
from common.data import build_datasets
from common.errors import number, refuse, require
from common.model import check_model

FILES = " from files"
TOGETHER, ROUNDS = 225, 2  # seconds for all that are held in memory together; rounds at least, and where they are not
WARM_UP = 2  # steps: the first allocates, and then DDP rebuilds its buckets
LABELS = {"bare": "limit: the bare loop", "decoding": "limit: decoding alone", **report.NAMES}
if not importlib.util.find_spec("apex"):  # as 04_apex/run.sh does, more carefully
    on = torch.cuda.is_available() or "bf16" in Path("/proc/cpuinfo").read_text()  # as in native.py
    LABELS["04_apex"] = f"torch.amp{'' if on else ' off'} (04, no Apex)"
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
- images/s: the median step of all turns, after {warm_up} steps of warm-up{more}; min-max: the turns' medians.
- of the limit: of the bare loop with as many processes{files}. That computes in 32 bits: 04 may exceed it.
  After +-: its standard error, from how the turns differ. Less than twice that away from 1.00 is no difference.
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
    add("--rounds", type=number(1), help="turns of each (default: what there is time for in 8 minutes; on GPUs 2)")
    add("--steps", type=number(1), help="of each turn (default: 1, with --data 4; on GPUs 10)")
    add("--data", help="a folder of images, on which the methods are timed, too")
    add("--arch", default="resnet18")
    add("--image-size", type=number(1), default=128)
    add("--batch-size", type=number(1), default=64)
    add("--workers", type=number(1), default=2)
    args, others = parser.parse_known_args()
    args.pretrained = args.evaluate = False
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    count = int(os.environ.get("NPROC") or gpus or min(4, cores))
    args.steps = args.steps or (10 if gpus else 4 if args.data else 1)
    check_model(args, max(1, args.batch_size // count))
    options = ["--arch", args.arch, "--image-size", args.image_size, "--batch-size", args.batch_size]
    options += ["--workers", args.workers, *others]
    racers = list_racers(args, options, count, cores)
    rounds = {"": count_rounds("fake", args, gpus)}
    if args.data:
        rounds[FILES] = count_rounds(args.data, args, gpus)

    start = time.monotonic()
    results, failures, alone = {racer: [] for racer in racers}, {}, []
    for kind in dict.fromkeys(racer[2] or racer[1] for racer in racers):
        heat = {racer: command for racer, command in racers.items() if (racer[2] or racer[1]) == kind}
        if gpus or not race(heat, rounds[FILES if kind == FILES else ""], args, cores, results, failures):
            alone += heat
    for _ in range(args.rounds or ROUNDS):
        for racer in [racer for racer in alone if racer not in failures]:
            race({racer: racers[racer]}, 1, args, cores, results, failures)
    figures = {racer: summary(found, args.batch_size) for racer, found in results.items() if racer not in failures}
    if args.data:
        print("decoding alone".ljust(60), end="\r", flush=True)
        shape = [args.data, args.image_size, args.batch_size, cores, 20]
        speed = float(Job(["python3", ROOT / "common" / "decoding.py", *shape], 1, cores).end())
        figures["decoding", cores, FILES] = {"images_per_second": speed, "rounds": [speed]}
    rows = [row(racer, figures, failures) for racer in figures | failures]
    share = "a GPU of its own" if gpus else "as many cores as all N together, so that 1/N is all there is to get"
    words = (
        {"what": "one GPU", "gpu": ", and its GPU's"} if gpus else {"what": "all of this machine's cores", "gpu": ""}
    )
    words["files"] = "; from files: of the lower of decoding and the method on synthetic images" if args.data else ""
    words["more"] = f" (from files {2 * args.workers} more, in each turn)" if args.data else ""
    legend = LEGEND.format(warm_up=WARM_UP, share=share, **words)
    machine = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{cores} cores, no GPU"
    turns = "-".join(map(str, sorted({len(figure["rounds"]) for racer, figure in figures.items() if racer in racers})))
    setting = f"{' '.join(map(str, options))}; {turns} turns of {args.steps} steps; {machine}; "
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


def uncounted(source, args):
    """Returns the number of a turn's steps that do not count: from files, its first batches were decoded before it."""
    return 2 * args.workers if source == FILES else 0


def count_rounds(data, args, gpus):
    """Returns how many turns each may have: an epoch must not end during the race."""
    steps = uncounted("" if data == "fake" else FILES, args) + args.steps
    images = len(build_datasets(data, args.image_size)[0])
    possible = (images // args.batch_size - WARM_UP) // steps
    needed = (WARM_UP + steps * (args.rounds or ROUNDS)) * args.batch_size
    require(
        possible >= (args.rounds or ROUNDS), f"--data {data}: {images} images for training, but the race takes {needed}"
    )
    return args.rounds or (ROUNDS if gpus else min(possible, 20))


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
        for method in report.NAMES:
            processes = 1 if method == "01_dataparallel" and not torch.cuda.is_available() else count
            racers[method, processes, FILES] = ["bash", ROOT / method / "run.sh", "--data", args.data, *options]
    return racers


def race(commands, rounds, args, cores, results, failures):
    """Starts racers one after another, has them take turns, and adds each one's figures to the results.

    Returns False, having started only the first, if memory is too short to hold all of them.
    """
    begin, jobs = time.monotonic(), {}

    def attempt(what, racer, action):
        print(f"{what}  {' '.join(map(str, racer))}".ljust(60), end="\r", flush=True)
        try:
            action(racer)
        except RuntimeError as error:
            print(" " * 60, end="\r", flush=True)
            require(racer[0] != "02_distributed", error)  # the options' fault, which others would only repeat
            failures[racer] = str(error)

    def start(racer):
        method, processes, _ = racer
        launch = time.time()
        jobs[racer] = Job(commands[racer], processes, cores, PROBE_STEPS=WARM_UP)
        figures = jobs[racer].connect(1 if method == "01_dataparallel" else processes)
        results[racer].append([figure | {"launch": launch} for figure in figures])

    def take_turn(racer):
        figures = jobs[racer].take_turn(uncounted(racer[2], args) + args.steps)
        results[racer].append([figure | {"steps": args.steps} for figure in figures])

    try:
        for racer in commands:
            before = psutil.virtual_memory().available
            attempt("starting", racer, start)
            left = psutil.virtual_memory().available
            if len(jobs) == 1 and (before - left) * (len(commands) - 1) > left:
                return False
        for turn in range(1, rounds + 1):
            turn_begin = time.monotonic()
            for racer in commands:
                if racer not in failures:
                    attempt(f"turn {turn}", racer, take_turn)
            now = time.monotonic()
            if not args.rounds and turn >= ROUNDS and now + (now - turn_begin) > begin + TOGETHER:
                break
        return True
    finally:
        for racer in jobs:
            if racer not in failures:
                attempt("ending", racer, lambda racer: jobs[racer].end())


class Job:
    """A command with probe.py in its processes, which wait in memory for their turns."""

    def __init__(self, command, processes, cores, **env):
        self.server = socket.create_server(("127.0.0.1", 0))
        env |= {"PROBE_PORT": self.server.getsockname()[1], "NPROC": processes}
        env["OMP_NUM_THREADS"] = max(1, cores // processes)
        env = os.environ | {name: str(value) for name, value in env.items()}
        self.folder = tempfile.TemporaryDirectory()
        self.printed, self.errors = Path(self.folder.name, "printed"), Path(self.folder.name, "errors")
        with self.printed.open("w") as printed, self.errors.open("w") as errors:
            files = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors}
            self.process = subprocess.Popen([str(part) for part in command], env=env, **files)
        self.connections = []

    def connect(self, count):
        """Waits until so many processes have taken their first steps, and returns their figures."""
        ended = os.pidfd_open(self.process.pid)
        while len(self.connections) < count:
            if self.server not in select.select([self.server, ended], [], [])[0]:
                break  # it has ended: read() says so
            self.connections.append(self.server.accept()[0].makefile("rw"))
        os.close(ended)
        return self.read(count)

    def take_turn(self, steps):
        """Has the processes take so many steps, and returns their figures."""
        for connection in self.connections:
            print(steps, file=connection, flush=True)
        return self.read(len(self.connections))

    def read(self, count):
        lines = [connection.readline() for connection in self.connections]
        if not all(lines) or len(lines) < count:
            self.end()
            raise RuntimeError("it ended before its turn")
        return [json.loads(line) for line in lines]

    def end(self):
        """Hangs up, which ends the processes, and returns what the command printed. RuntimeError says why it failed."""
        for connection in self.connections:
            connection.close()
        self.server.close()
        status = self.process.wait()
        printed, errors = self.printed.read_text(), self.errors.read_text().splitlines()
        self.folder.cleanup()
        if status:
            line = next((line for line in errors if "error" in line.lower()), f"status {status}")
            raise RuntimeError(line.partition("rror: ")[2] or line)
        return printed


def summary(reports, batch_size):
    """reports: of each start and each turn, the figures of all processes. Returns the medians that the table shows."""
    starts, turns = [[report for report in reports if name in report[0]] for name in ("launch", "steps")]
    steps, waits = [], []
    for turn in turns:
        count = turn[0]["steps"]
        ends = [max(times) for times in zip(*(process["marks"] for process in turn))][-count - 1 :]
        steps.append([after - before for before, after in pairwise(ends)])
        waits += [median(process["waits"][-count:]) for process in turn if process["waits"]]
    step = median(time for times in steps for time in times)
    return {
        "images_per_second": batch_size / step,
        "rounds": [batch_size / median(times) for times in steps],
        "first_step": median(max(process["marks"][0] - process["launch"] for process in start) for start in starts),
        "memory": median(max(process["memory"] for process in turn) for turn in turns),
        "gpu_memory": median(max(process.get("gpu_memory", 0) for process in turn) for turn in turns),
        "waiting": median(waits) / step if waits else None,
    }


def standard_error(ours, theirs):
    """Returns that of the ratio of two lists' medians, by the bootstrap: how it varies if turns are drawn anew.

    Two that took turns are drawn together, as the machine's ups and downs are common to them. B. Efron, "Bootstrap
    methods: another look at the jackknife", The Annals of Statistics 7 (1979).
    """
    draw, ratios = random.Random(0), []
    for _ in range(1000):
        our, their = (draw.choices(range(len(turns)), k=len(turns)) for turns in (ours, theirs))
        if len(our) == len(their):
            their = our
        ratios.append(median(ours[i] for i in our) / median(theirs[i] for i in their))
    return stdev(ratios)


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

    def ratio(*others, times=1, error=False):
        if not all(other in figures for other in others):
            return "-"
        least = min((figures[other] for other in others), key=lambda other: other["images_per_second"])
        text = f"{speed / times / least['images_per_second']:.2f}"
        return f"{text} +- {standard_error(rounds, least['rounds']):.2f}" if error else text

    limits = [("bare", processes, "")]
    if source == FILES:
        limits = [racer for racer in figures if racer[0] == "decoding"] + [(method, processes, "")]
    waits = processes > 1 and figure["waiting"] is not None
    return [
        *cells,
        ratio(*limits, error=racer not in limits),
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
    axes.set_xlabel("training speed, images per second: median, and range of the turns")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
