"""All five methods compute what a plain loop computes, and a script with one of the classic mistakes does not."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import HAS_APEX, METHODS, ROOT, free_port, launch, load, metrics, train

from common.data import build_datasets
from common.model import build_model

BATCH = 48  # can be shared out among 2 and among 3 processes
EXACT = ["--dtype", "float64", "--batch-size", BATCH, "--workers", 0]
RUNS = [*[(method, 2) for method in METHODS], pytest.param("02_distributed", 3, marks=pytest.mark.full)]


def everything(dataset):
    images, labels = zip(*dataset, strict=True)
    return torch.stack(images).double(), torch.tensor(labels)


def plain_loop(epochs, steps=None):
    """What all must come to: one process, no sampler, no loader. Returns the weights and the last epoch's metrics."""
    train_set, val_set = build_datasets("digits", 8)
    images, labels = everything(train_set)
    torch.manual_seed(0)
    model = build_model("cnn", num_classes=10).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0 + epoch))
        losses = []
        for batch in order.split(BATCH)[: steps or len(images) // BATCH]:
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    images, labels = everything(val_set)
    with torch.no_grad():
        output = model(images)
    top1 = 100 * (output.argmax(1) == labels).double().mean().item()
    loss = F.cross_entropy(output, labels).item()
    return model.state_dict(), {"train_loss": sum(losses) / len(losses), "val_loss": loss, "top1": top1}


def difference(output, expected):
    """Returns the largest difference of a run's last.pt and last metrics from the plain loop's."""
    weights, figures = expected
    checkpoint = load(output)
    assert checkpoint["model"].keys() == weights.keys()
    assert checkpoint["history"] == metrics(output)
    of_weights = max((checkpoint["model"][name] - weights[name]).abs().max().item() for name in weights)
    return max(of_weights, *(abs(metrics(output)[-1][name] - figures[name]) for name in figures))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a function that trains 2 epochs in float64 with a method, once, and returns the output directory."""
    outputs = {}

    def get(method, nproc):
        if (method, nproc) not in outputs:
            outputs[method, nproc] = output = tmp_path_factory.mktemp(f"{method}-{nproc}")
            train(method, *exact(method), "--epochs", 2, "--output", output, nproc=nproc)
        return outputs[method, nproc]

    return get


def exact(method):
    return [*EXACT, "--no-amp"] if method == "04_apex" and not HAS_APEX else EXACT


@pytest.fixture(scope="module")
def plain():
    """Plain loops of 2 and 3 epochs."""
    return {epochs: plain_loop(epochs) for epochs in (2, 3)}


@pytest.mark.parametrize(("method", "nproc"), RUNS)
def test_float64(method, nproc, trained, plain, record_property):
    output = trained(method, nproc)
    assert metrics(output)[-1]["processes"] == (1 if method == "01_dataparallel" else nproc)
    found = difference(output, plain[2])
    record_property("difference", found)
    assert found < 1e-10


def others():
    """Returns every method's checkpoint in every other one, two of them for the quick set."""
    quick = [("04_apex", "05_horovod"), ("05_horovod", "01_dataparallel")]
    for saved in METHODS:
        for resumed in METHODS:
            marks = [] if (saved, resumed) in quick else [pytest.mark.full]
            yield pytest.param(saved, resumed, marks=marks, id=f"{saved}-in-{resumed}")


@pytest.mark.parametrize(("saved", "resumed"), list(others()))
def test_checkpoint_goes_on_in_another_method(saved, resumed, trained, plain, tmp_path):
    """The weights after its next epoch are those of a run that never changed method; 02's file is of 3 processes."""
    file = trained(saved, 3 if saved == "02_distributed" else 2) / "last.pt"
    result = train(resumed, *exact(resumed), "--epochs", 3, "--resume", file, "--output", tmp_path)
    assert f"resuming from {file}" in result.output and "epoch 2 " not in result.output
    assert difference(tmp_path, plain[3]) < 1e-10
    assert [line["epoch"] for line in metrics(tmp_path)] == [1, 2, 3]


# The reader's mistakes: name -> script, and what of its text becomes what. 16 bits are none, but differ as well.
MISTAKES = {
    "none": ("02_distributed", {}),
    "model_not_wrapped": ("02_distributed", {"train_one_epoch(parallel,": "train_one_epoch(model,"}),
    "no_sampler": (
        "02_distributed",
        {"DistributedSampler(train_set, world_size, rank,": "DistributedSampler(train_set, 1, 0,"},
    ),
    "set_epoch_forgotten": ("02_distributed", {"sampler.set_epoch(epoch)": "sampler.set_epoch(0)"}),
    "loss_summed": ("02_distributed", {"(model(images), labels)": '(model(images), labels, reduction="sum")'}),
    "batch_size_per_process": (
        "02_distributed",
        {'"batch_size": args.batch_size // world_size': '"batch_size": args.batch_size'},
    ),
    "metrics_averaged_per_batch": (
        "02_distributed",
        {
            '(output, labels, reduction="sum")': "(output, labels)",
            "right[:, 0].sum()": "right[:, 0].double().mean()",
            "len(loader.dataset)": "len(loader)",
        },
    ),
    "none_in_horovod": ("05_horovod", {}),
    "own_weights_per_rank": (
        "05_horovod",
        {
            "torch.manual_seed(args.seed)": "torch.manual_seed(args.seed + rank)",
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (5)": "#",
        },
    ),
    "optimizer_not_wrapped": ("05_horovod", {"hvd.DistributedOptimizer(": "(lambda optimizer, *_: optimizer)("}),
    "16_bits": ("02_distributed", {'"--fp16-allreduce", action="store_true"': '"--fp16-allreduce", default=True'}),
    "16_bits_in_horovod": (
        "05_horovod",
        {'"--fp16-allreduce", action="store_true"': '"--fp16-allreduce", default=True'},
    ),
}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """Runs copies of 02 and 05 with a mistake each, all of a method in one launch; returns their output directories."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "common").symlink_to(ROOT / "common")
    runs = {"02_distributed": [], "05_horovod": []}
    for name, (method, changes) in MISTAKES.items():
        text = (ROOT / method / "main.py").read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"{name}: the line to spoil is no longer there"
            text = text.replace(old, new)
        (folder / name).mkdir()
        (folder / name / "main.py").write_text(text)
        options = [*EXACT, "--epochs", 2, "--max-steps", 4, "--output", folder / name / "out"]
        runs[method].append([str(part) for part in (free_port(), folder / name / "main.py", *options)])
    launchers = {
        "02_distributed": ["torchrun", "--standalone", "--nproc_per_node=2"],
        "05_horovod": ["horovodrun", "--gloo", "-np", 2, "-H", "localhost:2", "python3"],
    }
    for method, launcher in launchers.items():
        (folder / f"{method}.json").write_text(json.dumps(runs[method]))
        result = launch(*launcher, ROOT / "tests" / "run_many.py", folder / f"{method}.json", OMP_NUM_THREADS=1)
        assert result.returncode == 0, result.output
    return folder


@pytest.fixture(scope="module")
def plain_few_steps():
    return plain_loop(epochs=2, steps=4)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_noticed(mistake, mistaken, plain_few_steps, record_property):
    found = difference(mistaken / mistake / "out", plain_few_steps)
    record_property("difference", found)
    assert found < 1e-10 if mistake.startswith("none") else found > 1e-6
    assert found < 1e-3 or not mistake.startswith("16_bits")
