"""Wrong input ends with one line and status 2, input that is merely odd does not end the run.

The checks are code that the scripts share, and are tried here in this process: options with the parser of each of the
six scripts, the others by their functions in common/. That a script uses them, says it once and with all its processes
ends, is tried with one case of each kind through run.sh with 02's and 05's launchers, and with one case on 01, 03, 04:
most of these by -m full.
"""

import argparse
import math
import os
import pickle
import re
import runpy
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import CLASSES, METHODS, ROOT, launch, load, make_images, metrics, ranks, started, train
from PIL import Image

from common import errors
from common.data import build_datasets
from common.images import load_image
from common.model import build_model, check_model, read_checkpoint

FULL = pytest.mark.full
SCRIPTS = [f"{method}/main.py" for method in METHODS] + ["04_apex/native.py"]
SMALL = ["--arch", "mobilenet_v3_small", "--image-size", 32, "--batch-size", 8]


@pytest.fixture
def refused(capsys, monkeypatch):
    """Returns a function that calls another, which must end with status 2, and returns the one line that it printed."""
    for name in ("LOCAL_RANK", "REFUSAL_FILE"):
        monkeypatch.delenv(name, raising=False)

    def call(function, *args, **kwargs):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            function(*args, **kwargs)
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith("error: ")
        return line

    return call


# Options


@pytest.fixture(scope="module", params=SCRIPTS)
def parse(request):
    """Returns a function that parses options as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "04_apex/main.py":
            for name in ("apex", "apex.amp", "apex.parallel"):  # stand-ins, of which nothing is called here
                patch.setitem(sys.modules, name, mock.MagicMock())
        if request.param == "05_horovod/main.py":
            pytest.importorskip("horovod.torch")
        parse_args = runpy.run_path(str(ROOT / request.param))["parse_args"]
    return lambda *options: parsed(parse_args, options)


def parsed(parse_args, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["main.py", *options])
        return parse_args()


OPTIONS = {
    "misspelt": (["--batchsize", "32"], "unrecognized arguments: --batchsize 32"),
    "abbreviated": (["--epoch", "2"], "unrecognized arguments: --epoch 2"),
    "launcher's": (["--nproc_per_node", "2"], "unrecognized arguments: --nproc_per_node 2"),
    "left over": (["digits"], "unrecognized arguments: digits"),
    "without value": (["--lr"], "argument --lr: expected one argument"),
    "epochs 0": (["--epochs", "0"], "argument --epochs: 0 is out of range, which is 1 or more"),
    "epochs -1": (["--epochs", "-1"], "argument --epochs: -1 is out of range"),
    "epochs 1.5": (["--epochs", "1.5"], "argument --epochs: '1.5' is not an integer"),
    "batch 0": (["--batch-size", "0"], "argument --batch-size: 0 is out of range"),
    "batch -8": (["--batch-size=-8"], "argument --batch-size: -8 is out of range"),
    "image size": (["--image-size", "0"], "argument --image-size: 0 is out of range"),
    "lr nan": (["--lr", "nan"], "argument --lr: nan is out of range"),
    "lr inf": (["--lr", "inf"], "argument --lr: inf is out of range"),
    "lr < 0": (["--lr=-0.1"], "argument --lr: -0.1 is out of range"),
    "lr text": (["--lr", "0,1"], "argument --lr: '0,1' is not a number"),
    "momentum": (["--momentum", "1.5"], "argument --momentum: 1.5 is out of range, which is 0.0 to 1.0"),
    "weight decay": (["--weight-decay=-1"], "argument --weight-decay: -1 is out of range"),
    "workers": (["--workers=-1"], "argument --workers: -1 is out of range"),
    "seed": (["--seed=-1"], "argument --seed: -1 is out of range"),
    "max steps": (["--max-steps", "0"], "argument --max-steps: 0 is out of range"),
    "dtype": (["--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_option(case, parse, refused):
    options, words = OPTIONS[case]
    assert words in refused(parse, *options)


def test_options_of_some_scripts(parse, refused):
    if "timeout" in parse():
        assert "argument --timeout: 0 is out of range" in refused(parse, "--timeout", "0")
    if "backend" in parse():
        assert "argument --backend: invalid choice: 'mpi'" in refused(parse, "--backend", "mpi")
        if not torch.cuda.is_available():
            assert "argument --backend: invalid choice: 'nccl'" in refused(parse, "--backend", "nccl")
    if "nprocs" in parse():
        assert "argument --nprocs: 0 is out of range" in refused(parse, "--nprocs", "0")
        for url in ("hosta:29500", "tcp://hosta", "tcp://hosta:80000"):
            assert f"argument --dist-url: '{url}' is not of the form tcp://HOST:PORT" in refused(
                parse, "--dist-url", url
            )


# The start


ARGS = {
    "evaluate": False,
    "resume": None,
    "pretrained": False,
    "output": Path("output"),
    "arch": "cnn",
    "compile": False,
}
ARGS |= {"timeout": 600}
ENVIRONMENTS = {
    "python3": {},
    "torchrun": {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    "srun": {"RANK": "1", "LOCAL_RANK": "0"},
    "horovodrun": {"HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1"},
}
# A shell that a cluster gives out has the variables of srun and MPI, too.
RIGHT = {
    "python3": ["python3", "srun", "mpirun"],
    "torchrun": ["torchrun", "srun"],
    "horovodrun": ["horovodrun", "mpirun"],
}


def args(**changes):
    return argparse.Namespace(**ARGS | changes)


def start(monkeypatch, script, launcher, cuda=False, **changes):
    """Calls check_start for a script as if under a launcher."""
    for name in {name for env in ENVIRONMENTS.values() for name in env}:
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENTS[launcher].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(ROOT / script)])
    docstring = re.match(r'"""(.*?)"""', (ROOT / script).read_text(), re.DOTALL)[1]
    errors.check_start(args(**changes), cuda, docstring)


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_launcher(script, launcher, monkeypatch, refused, tmp_path):
    wanted = {"01": "python3", "02": "torchrun", "03": "python3", "04": "torchrun", "05": "horovodrun"}[script[:2]]
    if launcher in RIGHT[wanted]:
        start(monkeypatch, script, launcher, output=tmp_path)
    else:
        line = refused(start, monkeypatch, script, launcher)
        assert f"is to be started by {wanted}, not by" in line and f"{script.split('/')[0]}/run.sh, or {wanted}" in line


@pytest.mark.parametrize("script", SCRIPTS)
def test_more_processes_than_gpus(script, monkeypatch, refused, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launcher = {"01": "python3", "03": "python3", "05": "horovodrun"}.get(script[:2], "torchrun")
    changes = {"nprocs": 2} if script.startswith("03") else {}
    if script.startswith("01"):
        start(monkeypatch, script, launcher, cuda=True, output=tmp_path)  # one process for all GPUs
    else:
        line = refused(start, monkeypatch, script, launcher, cuda=True, **changes)
        assert line == "error: 2 processes, but only 1 GPUs, on this machine"


def test_evaluate_without_weights(monkeypatch, refused):
    assert "--evaluate: of which weights?" in refused(start, monkeypatch, SCRIPTS[0], "python3", evaluate=True)


def test_output(monkeypatch, refused, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    for name in ("file", "file/below/it", "dangling", "dangling/below"):
        line = refused(start, monkeypatch, SCRIPTS[0], "python3", output=tmp_path / name)
        assert line.startswith(f"error: --output: cannot write to {tmp_path / name}: ")
    start(monkeypatch, SCRIPTS[0], "python3", output=tmp_path / "a" / "b" / "c")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"]  # it made nothing


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NPROC": "0"}, "NPROC: '0' is no number of processes"),
        ({"NPROC": "two"}, "NPROC: 'two' is no number of processes"),
        ({"NPROC": "-1"}, "NPROC: '-1' is no number of processes"),
        ({"CUDA_VISIBLE_DEVICES": "0", "NPROC": "2"}, "NPROC: 2 processes, but only 1 GPUs, on this machine"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS: '-1' is no number of restarts"),
        ({"MAX_RESTARTS": "1"}, "MAX_RESTARTS: "),
        ({"NNODES": "two"}, "NNODES: 'two' is no number of machines"),
        ({"NNODES": "2:1"}, "NNODES: '2:1' is no number of machines"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "hosta"}, "NODE_RANK: '2' is none of 0 to 1"),
        ({"NNODES": "9", "NODE_RANK": "08", "MASTER_ADDR": "hosta"}, "NODE_RANK: '08' is none of 0 to 8"),
        ({"NNODES": "2", "MASTER_PORT": "FREEPORT", "MASTER_ADDR": "hosta"}, "MASTER_PORT: 'FREEPORT' is no port"),
        ({"NNODES": "2", "MASTER_PORT": "80000", "MASTER_ADDR": "hosta"}, "MASTER_PORT: '80000' is no port"),
        ({"NNODES": "2"}, "MASTER_ADDR: with NNODES=2, the first machine's name or address"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{name}={text}" for name, text in value.items()),
)
@pytest.mark.parametrize("method", METHODS)
def test_variables_of_run_sh(method, variables, words):
    if method in ("02_distributed", "04_apex") and variables == {"MAX_RESTARTS": "1"}:
        pytest.skip("it can restart")
    result = launch("bash", ROOT / method / "run.sh", **{"CUDA_VISIBLE_DEVICES": ""} | variables)
    lines = [line for line in result.output.splitlines() if not line.startswith("04_apex: ")]
    assert result.returncode == 2 and len(lines) == 1 and lines[0].startswith(f"error: {words}")


def test_restarts_from_another_file():
    """Each restart would begin from that file again."""
    job = {"SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": 1}
    for script, variables in (
        ("run.sh", {"MAX_RESTARTS": 1}),
        ("run.sh", {"NNODES": "1:2", "MASTER_ADDR": "hosta"}),
        ("slurm.sh", job),
    ):
        for option in (["--resume", "other.pt"], ["--resume=other.pt"]):
            result = launch("bash", ROOT / "02_distributed" / script, "--lr", 1, *option, "--epochs", 1, **variables)
            assert result.returncode == 2 and result.output.startswith(
                "error: --resume: a job that restarts by itself goes on"
            )


def test_machines_of_01_03_and_05():
    def line(method, **variables):
        result = launch("bash", ROOT / method / "run.sh", **variables)
        assert result.returncode == 2
        return result.output

    two = {"NNODES": 2, "MASTER_ADDR": "hosta"}
    assert line("01_dataparallel", **two).startswith("error: NNODES: nn.DataParallel is one process on one machine")
    assert line("05_horovod", **two).startswith("error: NNODES: horovodrun starts the processes of all machines")
    for hosts in ("hosta", "hosta:0", "hosta:1,", "hosta:1 hostb:1"):
        assert line("05_horovod", HOSTS=hosts).startswith(f"error: HOSTS: '{hosts}' is no list of machines")
    assert line("03_multiprocessing", **two | {"NNODES": "1:2"}).startswith("error: NNODES: 03 takes one number")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--world-size", "2"], "--dist-url: must be that of the first of the machines"),
        (["--dist-url", "tcp://127.0.0.1:{taken}"], "the port to meet at is taken: "),
    ],
    ids=["no url", "taken"],
)
def test_machines_of_03(options, words):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = [option.format(taken=taken.getsockname()[1]) for option in options]
        line = refused_run("03_multiprocessing", *options)
    assert line.startswith(f"error: {words}")


# Data


@pytest.fixture
def tree(tmp_path):
    return make_images(tmp_path / "tree", 8, 4, CLASSES)


DATA = {
    "missing": (lambda tree: tree / "nosuch", "there is no {data}"),
    "a file": (lambda tree: tree / "train" / "cat" / "000.jpg", "{data} is a file"),
    "train itself": (
        lambda tree: tree / "train",
        "{data} has no folder train and no folder val; wanted: .* did you mean",
    ),
    "no val": (lambda tree: remove(tree / "val"), "{data} has no folder val"),
    "empty val": (lambda tree: remove(tree / "val", and_make=True), "no folders in {data}/val"),
    "empty class": (lambda tree: make(tree / "train" / "dog"), "no images in these folders of {data}/train: dog"),
    "no images": (lambda tree: remove(tree / "train" / "cat", and_make=True), "no images in .*/train: cat"),
    "classes differ": (
        lambda tree: rename(tree / "val" / "cat"),
        "train/ and val/ in {data} have different classes: cat, lion",
    ),
}


def remove(folder, and_make=False):
    subprocess.run(["rm", "-r", folder], check=True)
    if and_make:
        folder.mkdir()
    return Path(str(folder).split("/tree/")[0]) / "tree"


def make(folder):
    folder.mkdir()
    return folder.parents[1]


def rename(folder):
    folder.rename(folder.with_name("lion"))
    return folder.parents[1]


@pytest.mark.parametrize("case", DATA)
def test_data(case, tree, refused):
    change, words = DATA[case]
    data = change(tree)
    assert re.search("--data: " + words.format(data=data), refused(build_datasets, str(data), 24))


def test_hidden_files_are_left_out(tree, capsys):
    """And say so; the labels of the others stay the same."""
    plain, _ = build_datasets(str(tree), 24)
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (tree / "train" / name).mkdir()
        (tree / "train" / name / "000.jpg").write_bytes((tree / "train" / "cat" / "000.jpg").read_bytes())
    (tree / "train" / "cat" / "._000.jpg").write_text("a Mac's")
    (tree / "train" / "notes.txt").write_text("a plain file beside the classes")
    capsys.readouterr()
    train_set, _ = build_datasets(str(tree), 24)
    assert train_set.classes == CLASSES and train_set.samples == plain.samples
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: --data: hidden files and folders are left out: .ipynb_checkpoints, __MACOSX, ")
    assert line.endswith("._000.jpg")


def grey(mode, value):
    return Image.fromarray(np.full((30, 40), value, dtype={"L": "uint8", "I;16": "uint16"}[mode]))


ODD = {  # name: (image, options of save, the colour that must come out at the top left)
    "grey.png": (grey("L", 100), {}, (100, 100, 100)),
    "16 bits.png": (grey("I;16", 100 * 256), {}, (100, 100, 100)),
    "16 bits.tif": (grey("I;16", 100 * 256), {}, (100, 100, 100)),
    "one bit.png": (grey("L", 255).convert("1"), {}, (255, 255, 255)),
    "colours.png": (Image.new("RGB", (40, 30), (255, 0, 0)).quantize(4), {}, (255, 0, 0)),
    "palette.png": (Image.new("RGB", (40, 30), (9, 8, 7)).quantize(4), {"transparency": b"\x00\xff"}, (9, 8, 7)),
    "transparent.png": (Image.new("RGBA", (40, 30), (9, 8, 7, 128)), {}, (9, 8, 7)),
    "print.jpg": (Image.new("RGB", (40, 30), (0, 255, 0)).convert("CMYK"), {}, (0, 255, 0)),
    "UPPER.JPG": (Image.new("RGB", (40, 30), (200, 0, 0)), {"format": "jpeg", "quality": 100}, (200, 0, 0)),
    "Mixed.Jpeg": (Image.new("RGB", (40, 30), (200, 0, 0)), {"format": "jpeg", "quality": 100}, (200, 0, 0)),
    "small.png": (Image.new("RGB", (1, 1), (1, 2, 3)), {}, (1, 2, 3)),
    "wide.png": (Image.new("RGB", (3000, 2), (1, 2, 3)), {}, (1, 2, 3)),
    "high.png": (Image.new("RGB", (2, 3000), (1, 2, 3)), {}, (1, 2, 3)),
}


def test_odd_images(tmp_path, recwarn):
    """Come out upright and in three channels, and are cropped to the same size; a class may be a link."""
    (tmp_path / "elsewhere").mkdir()
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "红 花").symlink_to(tmp_path / "elsewhere")
    for name, (image, options, _) in ODD.items():
        image.save(tmp_path / "elsewhere" / name, **options)
    rotated = Image.new("RGB", (40, 30), (0, 0, 0))
    rotated.paste((255, 255, 255), (0, 0, 20, 30))  # the left half is white
    exif = rotated.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: then the upper half is
    rotated.save(tmp_path / "elsewhere" / "rotated.png", exif=exif)
    for name, (_, _, colour) in ODD.items():
        pixel = load_image(tmp_path / "elsewhere" / name).getpixel((0, 0))
        assert max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) <= 4, name
    upright = load_image(tmp_path / "elsewhere" / "rotated.png")
    assert (
        upright.size == (30, 40)
        and upright.getpixel((29, 0)) == (255, 255, 255)
        and upright.getpixel((0, 39)) == (0,) * 3
    )
    train_set, val_set = build_datasets(str(tmp_path), 24)
    assert len(train_set) == len(val_set) == len(ODD) + 1
    for dataset in (train_set, val_set):
        assert all(image.shape == (3, 24, 24) for image, _ in dataset)
    assert not recwarn.list


def broken(path, how):
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("This is no image.")
    else:
        path.unlink()
        path.symlink_to("/nowhere/at all.jpg")
    return path


@pytest.mark.parametrize("how", ["truncated", "empty", "text", "dangling"])
def test_broken_image_is_named(how, tree):
    path = broken(tree / "train" / "cat" / "002.jpg", how)
    train_set, _ = build_datasets(str(tree), 24)
    for workers in (0, 1) if how == "truncated" else (0,):
        with pytest.raises(errors.BrokenFile, match=re.escape(f"--data: cannot read {path}: ")):
            list(torch.utils.data.DataLoader(train_set, num_workers=workers))


@pytest.mark.parametrize(
    ("method", "split", "workers"),
    [
        ("02_distributed", "train", 2),
        pytest.param("01_dataparallel", "val", 2, marks=FULL),
        ("05_horovod", "train", 0),
        pytest.param("03_multiprocessing", "train", 2, marks=FULL),
        pytest.param("02_distributed", "val", 0, marks=FULL),
        pytest.param("04_apex", "val", 2, marks=FULL),
    ],
)
def test_broken_image_on_rank_1(method, split, workers, tmp_path):
    """Rank 0 cannot know; all processes end, and the line is there."""
    data = make_images(tmp_path / "data", 8, 7, CLASSES)
    dataset = build_datasets(str(data), 24)[split == "val"]
    second = torch.randperm(8, generator=torch.Generator().manual_seed(0))[1] if split == "train" else 1
    path = broken(Path(dataset.samples[second][0]), "truncated")
    options = ["--data", data, *SMALL, "--workers", workers, "--epochs", 1, "--output", tmp_path / "output"]
    line = refused_run(method, *options)
    assert line.startswith(f"error: --data: cannot read {path}: image file is truncated")
    assert not (tmp_path / "output").exists()


def refused_run(method, *options, **env):
    """Runs a run.sh, which must end with status 2 and one line about it; returns that line."""
    result = launch("bash", ROOT / method / "run.sh", *options, **{"NPROC": 2} | env, timeout=60)
    assert result.returncode == 2, result.output
    (line,) = [line for line in result.output.splitlines() if "error" in line.lower() or "Traceback" in line]
    return line


@pytest.mark.full
def test_broken_digits(checkout, refused, monkeypatch):
    """A half-written cache, which ours never is: someone has removed files from it."""
    build = "import sys; sys.path.insert(0, '.'); from common.data import digits_folder; digits_folder()"
    assert launch("python3", "-c", build, cwd=checkout).returncode == 0
    next(checkout.glob("data/digits/train/3/*.png")).unlink()
    result = launch("python3", "-c", build, cwd=checkout)
    assert result.returncode == 2 and "remove that folder, it will be made again" in result.output


# Networks


@pytest.mark.parametrize(
    ("arch", "size", "batch", "words"),
    [
        ("resnet19", 32, 8, "--arch: resnet19 is neither .*; did you mean resnet18"),
        ("nosuch", 32, 8, "--arch: nosuch is neither cnn nor a classification model of torchvision"),
        ("get_model", 32, 8, "--arch: get_model is neither"),
        ("fcn_resnet50", 32, 8, "--arch: fcn_resnet50 is neither"),
        ("alexnet", 32, 8, "--image-size: alexnet cannot take 32 pixels, but it can 63 "),
        ("inception_v3", 64, 8, "--image-size: inception_v3 cannot take 64 pixels, but it can 75 "),
        ("squeezenet1_1", 8, 8, "--image-size: squeezenet1_1 cannot take 8 pixels, but it can 17 "),
        ("vit_b_16", 32, 8, "--image-size: vit_b_16 cannot take 32 pixels, but it can 224 "),
        ("vit_b_16", 300, 8, "--image-size: vit_b_16 cannot take 300 pixels, but it can 224 "),
        ("resnet18", 32, 1, "--batch-size: resnet18 has batch norm, which needs two images or more per process"),
    ],
)
def test_network(arch, size, batch, words, refused):
    changes = args(arch=arch, image_size=size)
    assert re.search(words, refused(check_model, changes, batch))


def test_network_that_fits():
    for arch, size, batch in (("cnn", 8, 1), ("resnet18", 33, 1), ("regnet_y_400mf", 32, 2), ("googlenet", 15, 2)):
        check_model(args(arch=arch, image_size=size), batch)
    check_model(args(arch="resnet18", image_size=32, evaluate=True), 1)  # batch norm needs none then


def test_pretrained_cnn(refused):
    line = refused(check_model, args(arch="cnn", image_size=8, pretrained=True), 8)
    assert "--pretrained: there are no pretrained weights for cnn" in line


# Checkpoints


@pytest.fixture(scope="module")
def checkpoint(images, tmp_path_factory):
    """A run of one epoch on two classes; returns its output folder."""
    output = tmp_path_factory.mktemp("checkpoint")
    train("01_dataparallel", "--data", images, *SMALL, "--workers", 0, "--epochs", 1, "--output", output)
    return output


def read(path, arch="mobilenet_v3_small", classes=CLASSES, evaluate=False):
    model = build_model(arch, len(classes))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return read_checkpoint(args(arch=arch, resume=path, evaluate=evaluate), parts, classes)


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil was here",))


CHECKPOINTS = {  # name: (what becomes of the checkpoint, the error)
    "missing": (lambda path, data: path.unlink(), "there is no file {path}"),
    "folder": (lambda path, data: (path.unlink(), path.mkdir()), "there is no file {path}"),
    "empty": (lambda path, data: path.write_bytes(b""), "{path} is truncated, no checkpoint, or"),
    "truncated": (
        lambda path, data: path.write_bytes(path.read_bytes()[:-1000]),
        "{path} is truncated, no checkpoint, or",
    ),
    "text": (lambda path, data: path.write_text("weights"), "{path} is truncated, no checkpoint, or"),
    "code": (lambda path, data: torch.save({"model": Evil()}, path), "one with code inside, which is not run"),
    "pickle": (lambda path, data: path.write_bytes(pickle.dumps(Evil())), "one with code inside, which is not run"),
    "list": (lambda path, data: torch.save([1], path), "{path} is truncated, no checkpoint, or"),
    "a number": (lambda path, data: torch.save({"model": 1}, path), "{path} is truncated, no checkpoint, or"),
    "weights only": (
        lambda path, data: torch.save(data["model"], path),
        "has no optimizer, scheduler, best_top1, history",
    ),
    "no best": (
        lambda path, data: save_without(path, data, "best_top1"),
        "has no best_top1: it can be used with --evaluate",
    ),
    "no optimizer": (lambda path, data: save_without(path, data, "optimizer"), "has no optimizer"),
    "no layer": (
        lambda path, data: data["model"].popitem() and torch.save(data, path),
        "classifier.3.bias, ... differ",
    ),
    "Adam's": (
        lambda path, data: torch.save(data | {"optimizer": adam(data["model"])}, path),
        "the optimizer in {path} is not SGD",
    ),
}


def save_without(path, data, name):
    torch.save({key: value for key, value in data.items() if key != name}, path)


def adam(weights):
    optimizer = torch.optim.Adam(build_model("mobilenet_v3_small", len(CLASSES)).parameters())
    return optimizer.state_dict()


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoint(case, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "last.pt"
    path.write_bytes((checkpoint / "last.pt").read_bytes())
    change, words = CHECKPOINTS[case]
    change(path, load(tmp_path))
    reason = read(str(path))
    assert isinstance(reason, str) and words.format(path=path) in reason and len(reason.splitlines()) == 1
    assert not Path("evil was here").exists()


def test_checkpoint_of_something_else(checkpoint):
    path = str(checkpoint / "last.pt")
    assert read("") == "--resume: there is no file ''"
    assert f"{path} is of --arch mobilenet_v3_small, not resnet18" in read(path, arch="resnet18")
    assert "has 2 classes, the data 3; in one only: dog, ..." in read(path, classes=[*CLASSES, "dog"])
    assert "has 2 classes, the data 2; in one only: dog, 红 花, ..." in read(path, classes=["cat", "dog"])


def test_checkpoints_from_elsewhere(checkpoint, tmp_path):
    """Weights alone, DataParallel's, pytorch/examples', a GPU's: all give the same for --evaluate."""
    own = read(str(checkpoint / "last.pt"), evaluate=True)["model"]
    module = {f"module.{name}": weight for name, weight in own.items()}
    gpu = tmp_path / "gpu.pt"
    with zipfile.ZipFile(checkpoint / "last.pt") as old, zipfile.ZipFile(gpu, "w") as new:  # as if saved on a GPU
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith("/data.pkl"):
                assert b"X\x03\x00\x00\x00cpu" in data
                data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7")
            new.writestr(item.filename, data)
    for name, content in (
        ("plain", own),
        ("module", module),
        ("examples", {"epoch": 3, "arch": "mobilenet_v3_small", "state_dict": module, "best_acc1": torch.tensor(5.0)}),
    ):
        torch.save(content, tmp_path / f"{name}.pt")
    for path in (*tmp_path.glob("*.pt"), checkpoint / "last.pt"):
        weights = read(str(path), evaluate=True)["model"]
        assert all(torch.equal(weights[name], own[name]) for name in own), path
    resumed = read(str(gpu))
    assert all(state["momentum_buffer"].device.type == "cpu" for state in resumed["optimizer"]["state"].values())
    assert resumed["classes"] == CLASSES


# All of this through the launchers


KINDS = {
    "option": (["--batchsize", 32], "unrecognized arguments: --batchsize 32"),
    "odd batch": (["--batch-size", 7], "--batch-size: must be a multiple of 2 (processes)"),
    "large batch": (["--batch-size", 2000], "--batch-size: must be at most 1437 (images)"),
    "data": (["--data", "/nosuch"], "--data: there is no /nosuch"),
    "arch": (["--arch", "alexnet", "--image-size", 32], "--image-size: alexnet cannot take 32 pixels"),
    "checkpoint": (["--resume", "/no/such.pt", "--evaluate"], "--resume: there is no file /no/such.pt"),
    "output": (["--output", "/dev/null/output"], "--output: cannot write to /dev/null/output: Not a directory"),
}
FIRST = {
    "02_distributed": ["option", "checkpoint"],
    "05_horovod": ["large batch"],
}


@pytest.mark.parametrize(
    ("method", "kind"),
    [pytest.param(method, kind, marks=() if kind in FIRST[method] else FULL) for method in FIRST for kind in KINDS],
)
def test_through_launchers(method, kind):
    options, words = KINDS[kind]
    assert refused_run(method, *options).startswith(f"error: {words}")


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        pytest.param(
            "01_dataparallel",
            ["--evaluate", "--resume", "--output", "/nosuch"],
            "--resume: there is no file /nosuch/last.pt",
            marks=FULL,
        ),
        ("03_multiprocessing", ["--batch-size", 7], "--batch-size: must be a multiple of 2 (processes)"),
        pytest.param("04_apex", ["--data", "/nosuch"], "--data: there is no /nosuch", marks=FULL),
    ],
    ids=METHODS[:1] + METHODS[2:4],
)
def test_through_the_others(method, options, words):
    assert refused_run(method, *options).startswith(f"error: {words}")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("torchrun --nproc_per_node=2 02_distributed/main.py --data /nosuch", 1),  # torchrun's own
        pytest.param("horovodrun --gloo -np 2 python3 05_horovod/main.py --data /nosuch", 1, marks=FULL),  # its own
        pytest.param("python3 03_multiprocessing/main.py --data /nosuch", 2, marks=FULL),
        ("python3 02_distributed/main.py", 2),
        pytest.param("python3 02_distributed/main.py --local_rank=0", 2, marks=FULL),
        pytest.param("torchrun --nproc_per_node=2 01_dataparallel/main.py", 1, marks=FULL),
        pytest.param("torchrun --nproc_per_node=2 03_multiprocessing/main.py", 1, marks=FULL),
        pytest.param("torchrun --nproc_per_node=2 05_horovod/main.py", 1, marks=FULL),
        pytest.param("torchrun 02_distributed/main.py --nproc_per_node 2", 1, marks=FULL),
        pytest.param("horovodrun --gloo -np 2 python3 02_distributed/main.py", 1, marks=FULL),
    ],
)
def test_without_run_sh(command, status):
    """One line of ours, whatever the launcher says about it afterwards."""
    result = launch(*command.split(), cwd=ROOT, OMP_NUM_THREADS=1)
    assert result.returncode == status, result.output
    lines = [line for line in result.output.splitlines() if "error: " in line]
    assert len(lines) == 1, result.output
    if status == 2:  # and nothing else, but for what mp.spawn says about what it does then
        assert [line for line in result.output.splitlines() if "multiprocessing/spawn.py" not in line] == lines
    assert "/nosuch" in lines[0] or "is to be started by" in lines[0] or "unrecognized" in lines[0]


@pytest.mark.full
def test_four_processes_make_one_output(tmp_path):
    """Below folders that are not there yet; rank 0 alone prints and writes."""
    options = ["--workers", 0, "--max-steps", 1, "--epochs", 2, "--output", tmp_path / "a" / "b" / "c"]
    text = train("02_distributed", *options, nproc=4).output
    assert len(text.splitlines()) == 5 and text.count("epoch 1 ") == text.count("epoch 2 ") == 1
    assert sorted(os.listdir(tmp_path / "a" / "b" / "c")) == ["best.pt", "last.pt", "metrics.jsonl"]
    assert all(math.isfinite(line["val_loss"]) for line in metrics(tmp_path / "a" / "b" / "c"))


def test_help_is_printed_once():
    text = train("02_distributed", "--help").output
    assert text.count("usage:") == 1


@pytest.mark.full
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("method", METHODS)
def test_other_start_methods(method, start_method, images, tmp_path):
    """Of the loaders' workers: newer Pythons no longer fork by default."""
    wrapper = tmp_path / "main.py"
    wrapper.write_text(
        "import multiprocessing, runpy, sys\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method('{start_method}')\n"
        f"    sys.argv[0] = {str(ROOT / method / ('native.py' if method == '04_apex' else 'main.py'))!r}\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    if method == "03_multiprocessing":
        pytest.skip("it starts its processes by spawn, and sets fork for their workers")
    command = re.search(r"^    (.+)$", (ROOT / method / "main.py").read_text().split('"""')[1], re.MULTILINE)[1].split()
    options = ["--data", images, *SMALL, "--workers", 2, "--epochs", 1, "--output"]
    result = launch(*command[:-1], wrapper, *options, tmp_path / "o", cwd=tmp_path, OMP_NUM_THREADS=1)
    assert result.returncode == 0, result.output
    assert result.output.count("processes: ") == 1
    train(method, *options, tmp_path / "fork", OMP_NUM_THREADS=1)
    once = load(tmp_path / "fork")["model"]
    assert all(torch.equal(weight, once[name]) for name, weight in load(tmp_path / "o")["model"].items())


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_c_locale(method, images, tmp_path):
    """Where Python itself knows ASCII only."""
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": 0, "PYTHONUTF8": 0}
    options = ["--data", images, *SMALL, "--epochs", 1, "--output", tmp_path / "输 出"]
    train(method, *options, **ascii_only)
    assert len(load(tmp_path / "输 出")["classes"]) == 2


@pytest.mark.full
def test_too_few_descriptors(images, tmp_path):
    options = ["--data", images, *SMALL, "--workers", 4, "--epochs", 1, "--output", tmp_path]
    result = launch(
        "bash", "-c", 'ulimit -n 48; exec bash "$0" "$@"', ROOT / "02_distributed" / "run.sh", *options, NPROC=2
    )
    assert result.returncode != 0 and "Too many open files" in result.output


@pytest.mark.full
@pytest.mark.parametrize("method", ["02_distributed", "05_horovod"])
def test_descriptors_do_not_pile_up(method, tmp_path):
    options = ["--workers", 1, "--max-steps", 1, "--epochs", 25, "--output", tmp_path]
    counts = {}
    with started("bash", ROOT / method / "run.sh", *options, NPROC=2) as run:
        for line in run.stdout:
            if match := re.search(r"epoch (\d+)  train loss", line):
                counts[int(match[1])] = len(os.listdir(f"/proc/{ranks(run)[1].pid}/fd"))
                if int(match[1]) == 20:
                    break
    assert abs(counts[20] - counts[5]) <= 3, counts


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "size"), [("inception_v3", 75), ("googlenet", 15), ("alexnet", 63), ("squeezenet1_1", 17)]
)
def test_networks_with_side_outputs_or_a_least_size(arch, size, images, tmp_path):
    """Train under DDP at the size that check_model names: no parameter is without gradient, nothing returns a tuple."""
    options = ["--data", images, "--arch", arch, "--image-size", size, "--batch-size", 8, "--workers", 0]
    train("02_distributed", *options, "--epochs", 1, "--max-steps", 2, "--lr", 1e-4, "--output", tmp_path)
    assert load(tmp_path)["arch"] == arch


@pytest.mark.full
def test_threads_of_03_without_run_sh(tmp_path):
    """Its processes share the cores, which each of them would take for itself."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "torch = sys.modules.get\n"
        "atexit.register(lambda: torch('torch') and print('threads:', torch('torch').get_num_threads()))\n"
    )
    options = ["--workers", 0, "--max-steps", 1, "--epochs", 1, "--output", tmp_path / "o"]
    cores = len(os.sched_getaffinity(0))
    result = launch(
        "python3", ROOT / "03_multiprocessing" / "main.py", "--nprocs", cores, *options, PYTHONPATH=tmp_path
    )
    assert result.returncode == 0 and result.output.count("threads: 1\n") == cores, result.output
