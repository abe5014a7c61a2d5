"""Compares the runs of the five methods; called by run_all.sh:

    python3 common/report.py RUNS 01_dataparallel= 02_distributed= "05_horovod=why there is nothing to compare" ...

Reads RUNS/<method>/last.pt of each method that has no reason against it, prints a table, and writes it to
RUNS/comparison.md with a chart, RUNS/comparison.png. Ends with status 1 if a method is missing.
"""

import sys
from pathlib import Path
from statistics import mean

import torch

NAMES = {
    "01_dataparallel": "nn.DataParallel",
    "02_distributed": "torch.distributed",
    "03_multiprocessing": "torch.multiprocessing",
    "04_apex": "Apex",
    "05_horovod": "Horovod",
}
COLUMNS = ["method", "processes", "images/s", "seconds per epoch", "top-1 %", "largest weight difference from 02"]


def main():
    runs = Path(sys.argv[1])
    outcomes = dict(argument.split("=", 1) for argument in sys.argv[2:])
    for method in outcomes:
        if not (runs / method / "last.pt").is_file():  # nothing was trained: --evaluate, --epochs 0
            outcomes[method] = outcomes[method] or "left no checkpoint"
    checkpoints = {
        method: torch.load(runs / method / "last.pt", map_location="cpu", weights_only=True)
        for method, reason in outcomes.items()
        if not reason
    }
    reference = checkpoints.get("02_distributed")
    rows = []
    for method, reason in outcomes.items():
        if reason:
            rows.append([NAMES[method], "-", "-", "-", "-", reason])
        else:
            rows.append(row(name(method, checkpoints[method]), checkpoints[method], reference))
    print(text_table(rows))
    chart = {name(method, checkpoint): checkpoint["history"] for method, checkpoint in checkpoints.items()}
    if chart:
        draw(chart, runs / "comparison.png")
    (runs / "comparison.md").write_text(markdown_table(rows) + "\n![speed, and loss over time](comparison.png)\n")
    print(f"\nThe same with a chart: {runs / 'comparison.md'}, {runs / 'comparison.png'}")
    sys.exit(len(checkpoints) < len(outcomes))


def name(method, checkpoint):
    """04 runs one of two scripts, and the checkpoint knows which."""
    return "torch.amp (04, no Apex)" if checkpoint["command"][0].endswith("native.py") else NAMES[method]


def row(label, checkpoint, reference):
    history = checkpoint["history"]
    settled = history[1:] or history  # the first epoch also starts the loaders' workers and warms up caches
    return [
        label,
        str(history[-1]["processes"]),
        f"{mean(epoch['images_per_second'] for epoch in settled):,.0f}",
        f"{mean(epoch['seconds'] for epoch in settled):.2f}",
        f"{history[-1]['top1']:.2f}",
        f"{weight_difference(checkpoint, reference):.1e}" if reference else "-",
    ]


def weight_difference(checkpoint, reference):
    """Returns the largest absolute difference between any two corresponding numbers of two checkpoints' models."""
    one, other = checkpoint["model"], reference["model"]
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


def text_table(rows, columns=COLUMNS):
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    lines = []
    for line in [columns, *rows]:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return "\n".join(lines)


def markdown_table(rows, columns=COLUMNS):
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(histories, path):
    """Draws speed as bars and the training loss over time as lines; lines differ in dashes too, for grey prints."""
    import matplotlib

    matplotlib.use("Agg")  # no window: a server has none
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, (label, history) in enumerate(histories.items()):
        settled = history[1:] or history
        bar = left.barh(label, mean(epoch["images_per_second"] for epoch in settled), color=f"C{i}")
        left.bar_label(bar, fmt="{:,.0f}", label_type="center", color="white", weight="bold")
        elapsed = [sum(epoch["seconds"] for epoch in history[: n + 1]) for n in range(len(history))]
        style = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))][i]
        marker = "osv^D"[i]
        right.plot(elapsed, [epoch["train_loss"] for epoch in history], ls=style, marker=marker, ms=4, label=label)
    left.invert_yaxis()
    left.set_xlabel("training speed, images per second (without the first epoch)")
    right.set_xlabel("time since the start of the first epoch, seconds")
    right.set_ylabel("training loss, mean of an epoch")
    right.set_yscale("log")
    right.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
