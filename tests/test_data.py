"""The data and model helpers, and the digits that several processes build at once."""

import os
import signal
import sys
from unittest import mock

import pytest
import torch
from conftest import CLASSES, launch
from torch import nn

import common.data
from common.data import build_datasets
from common.model import build_model


def test_digits_are_built_once_by_racing_processes(checkout):
    """Two processes that wait for each other just before the build; before that, one killed in the middle of it."""
    build = "import sys; sys.path.insert(0, '.'); from common.data import digits_folder; "
    dying = (
        build + "import os, signal, PIL.Image as P; save = P.Image.save; seen = []\n"
        "def killed(*args):\n"
        "    seen.append(save(*args)); len(seen) == 900 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "P.Image.save = killed; digits_folder()"
    )
    assert launch("python3", "-c", dying, cwd=checkout).returncode == -signal.SIGKILL
    assert not (checkout / "data" / "digits").exists()
    leftovers = set(os.listdir(checkout / "data"))
    assert len(leftovers) == 1  # hidden, half, and not mistaken for the whole

    racing = (
        build + "import torch.distributed as dist, sklearn.datasets; dist.init_process_group('gloo'); dist.barrier(); "
        "print(len(list(digits_folder().glob('*/*/*.png'))), 'files')"
    )
    (checkout / "racing.py").write_text(racing)
    result = launch("torchrun", "--standalone", "--nproc_per_node=3", "racing.py", cwd=checkout)
    assert result.returncode == 0 and result.output.count("1797 files") == 3, result.output
    assert set(os.listdir(checkout / "data")) == leftovers | {"digits"}

    train = {path.name: path.parent.name for path in checkout.glob("data/digits/train/*/*.png")}
    val = {path.name: path.parent.name for path in checkout.glob("data/digits/val/*/*.png")}
    assert len(train) == 1437 and len(val) == 360 and not train.keys() & val.keys()
    for digit in "0123456789":
        assert list(val.values()).count(digit) in (35, 36, 37)
        assert list(train.values()).count(digit) in range(139, 147)


def test_image_folder(images):
    train_set, val_set = build_datasets(str(images), image_size=24, seed=5)
    assert (len(train_set), len(val_set)) == (16, 7)
    assert train_set.classes == val_set.classes == CLASSES
    image, label = val_set[6]
    assert image.shape == (3, 24, 24) and image.dtype == torch.float32 and label in (0, 1)
    assert torch.equal(val_set[6][0], val_set[6][0])


def test_augmentation_depends_on_seed_epoch_and_image_alone(images):
    def crops(seed, epoch, order):
        train_set, _ = build_datasets(str(images), image_size=24, seed=seed)
        train_set.set_epoch(epoch)
        return {index: train_set[index][0] for index in order}

    state = torch.get_rng_state()
    there, back = crops(0, 3, range(16)), crops(0, 3, reversed(range(16)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(there[i], back[i]) for i in range(16))
    for other in (crops(0, 4, range(16)), crops(1, 3, range(16))):
        assert not any(torch.equal(there[i], other[i]) for i in range(16))


def test_workers_follow_set_epoch(images):
    """Also workers that stay from epoch to epoch, whose copy of the data set was made in the first one."""
    train_set, _ = build_datasets(str(images), image_size=24)
    loader = torch.utils.data.DataLoader(train_set, batch_size=16, num_workers=1, persistent_workers=True)
    for epoch in (0, 1):
        train_set.set_epoch(epoch)
        (batch, _), *_ = loader
        assert torch.equal(batch[7], train_set[7][0])


def test_fake_images():
    (one, val_set), (same, _), (other, _) = (build_datasets("fake", 16, seed) for seed in (1, 1, 2))
    assert one[0][0].shape == (3, 16, 16) and len(one.classes) == 1000
    assert all(torch.equal(one[i][0], same[i][0]) and one[i][1] == same[i][1] for i in (0, 63, 12_799))
    assert not torch.equal(one[0][0], other[0][0]) and not torch.equal(one[0][0], val_set[0][0])
    assert abs(one.images.mean()) < 0.02 and abs(one.images.std() - 1) < 0.02


def test_digits_are_not_augmented():
    train_set, _ = build_datasets("digits", 8)
    first = train_set[0][0]
    train_set.set_epoch(1)
    assert first.shape == (3, 8, 8) and torch.equal(train_set[0][0], first)


@pytest.mark.parametrize("arch", ["cnn", "resnet18", "mobilenet_v3_small", "vit_b_32", "googlenet", "inception_v3"])
def test_model_has_the_right_number_of_classes(arch):
    model = build_model(arch, 7)
    size = {"cnn": 8, "inception_v3": 96, "vit_b_32": 224}.get(arch, 64)
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_cnn_has_neither_max_pooling_nor_batch_norm():
    assert not any(isinstance(m, (nn.MaxPool2d, nn.BatchNorm2d)) for m in build_model("cnn", 10).modules())


def refused(capsys, *args, **kwargs):
    with pytest.raises(SystemExit) as end:
        build_model(*args, **kwargs)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    return line


def test_pretrained(capsys, tmp_path, monkeypatch):
    """From a stand-in for the downloaded file: all layers but the last, and that one too with ImageNet's classes."""
    weights = build_model("resnet18", 1000).state_dict()
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(weights, tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    model = build_model("resnet18", 3, pretrained=True)
    assert model.fc.weight.shape == (3, 512)
    assert torch.equal(model.layer4[1].conv2.weight, weights["layer4.1.conv2.weight"])
    assert torch.equal(build_model("resnet18", 1000, pretrained=True).fc.weight, weights["fc.weight"])

    # Without the file and without a network:
    monkeypatch.setattr(torch.hub, "urlopen", mock.Mock(side_effect=OSError("no network")))
    assert "cannot download the weights of resnet34: no network" in refused(capsys, "resnet34", 3, pretrained=True)


def test_slow_libraries_are_imported_where_they_are_needed_only():
    build_datasets("digits", 8)  # there are digits from here on
    code = "import sys, common.data, common.model; print('torchvision' in sys.modules); "
    code += "common.data.build_datasets('digits', 8); print('sklearn' in sys.modules)"
    result = launch(sys.executable, "-c", code, cwd=common.data.DIGITS.parents[1])
    assert result.output.split() == ["False", "False"]
