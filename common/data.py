"""The three kinds of data that every main.py can train on: built-in digits, any ImageFolder tree, synthetic images."""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

DIGITS = Path(__file__).resolve().parents[1] / "data" / "digits"


def build_datasets(data, image_size=None, seed=0):
    """Returns (train_set, val_set), whose items are (image, label).

    data: "digits", "fake", or a directory with train/<class>/*.jpg and val/<class>/*.jpg, as ImageNet's.
    image_size: height and width of every image, in pixels; None: 8 for the digits, else 224.
    image: float32, (3, image_size, image_size), normalised channel by channel; label: int.
    Both sets have `classes`, the names in the order of the labels; train_set has `set_epoch`.
    A directory that is not such a tree ends the process with status 2.
    """
    if data == "fake":
        size = image_size or 224
        return FakeImages(12_800, size, seed), FakeImages(512, size, seed + 1)
    digits = data == "digits"
    root = digits_folder() if digits else Path(data)
    size = image_size or (8 if digits else 224)
    if digits:  # a mirrored or cropped digit may be another digit, or none
        train_transform = val_transform = v2.Resize((size, size))
    else:  # ImageNet's usual augmentation, and its evaluation crop: the middle 7/8 (224 of 256)
        train_transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
        val_transform = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size)])
    for split in ("train", "val"):
        if not (root / split).is_dir():
            refuse(f"--data: {root / split} is no directory; wanted: train/<class>/ and val/<class>/ in {root}")
    try:
        train_set = Images(root / "train", train_transform, seed)
        val_set = Images(root / "val", val_transform, seed)
    except FileNotFoundError as error:  # ImageFolder's words for: no classes, or a class without images
        refuse(f"--data: {error}".replace("\n", " "))
    if train_set.classes != val_set.classes:  # labels are positions in this list
        different = sorted(set(train_set.classes) ^ set(val_set.classes))
        refuse(f"--data: train/ and val/ in {root} have different classes: {', '.join(different)}")
    return train_set, val_set


class Images(ImageFolder):
    """An ImageFolder whose random augmentation depends on (seed, epoch, image) and on nothing else.

    An image's crop in an epoch is then the same whichever process or worker reads it: methods with different numbers
    of processes train on the same images, and a resumed run sees what an uninterrupted one would have seen.
    """

    def __init__(self, root, transform, seed):
        # ImageNet's mean and standard deviation, R G B; https://pytorch.org/vision/stable/models.html
        normalize = v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        super().__init__(root, v2.Compose([transform, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize]))
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # seen by workers that are already running

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __getitem__(self, index):
        generator = torch.default_generator  # the transforms' only source of random numbers
        state = generator.get_state()
        generator.manual_seed(hash((self.seed, self.epoch.item(), index)))
        try:
            return super().__getitem__(index)
        finally:
            generator.set_state(state)  # this process's own random numbers go on undisturbed


class FakeImages(Dataset):
    """`length` normally distributed images with labels of 1,000 classes: 64 of them held in memory, over and over."""

    def __init__(self, length, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(64, 3, size, size, generator=generator)
        self.labels = torch.randint(1000, (64,), generator=generator).tolist()
        self.length = length
        self.classes = [str(label) for label in range(1000)]

    def set_epoch(self, epoch):
        pass

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.images[index % 64], self.labels[index % 64]


def digits_folder():
    """Returns the folder of scikit-learn's handwritten digits; writes it (1,437 and 360 PNG files) if it is not there.

    Source: load_digits, the test part of https://archive.ics.uci.edu/dataset/80; 8 by 8 pixels, grey levels 0 to 16.
    """
    if DIGITS.is_dir():
        return DIGITS
    from PIL import Image
    from sklearn.datasets import load_digits  # imported here: it takes a second, and is needed once
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * (255 / 16)).round().astype("uint8")
    numbers = range(len(images))
    train, val = train_test_split(numbers, test_size=0.2, stratify=labels, random_state=2)  # shuffled, every class 4:1
    # Written aside and renamed when complete: of several processes that start at once the first to finish wins, and
    # a process that is interrupted leaves nothing under the final name.
    aside = None
    try:
        DIGITS.parent.mkdir(exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".digits.", dir=DIGITS.parent))
        for split, chosen in (("train", train), ("val", val)):
            for number in chosen:
                folder = aside / split / str(labels[number])
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(images[number]).save(folder / f"{number:04}.png")
        aside.chmod(0o755)  # mkdtemp's are for their owner alone
        aside.rename(DIGITS)
    except OSError as error:
        if not DIGITS.is_dir():  # not just another process that was first
            refuse(f"--data digits: cannot write them to {DIGITS}: {error}")
    finally:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
    return DIGITS


def refuse(message):
    """Ends this process with status 2 and one line on stderr, which only one of a machine's processes prints.

    All processes find the same fault at about the same time, and a launcher ends all of them when the first one exits:
    the silent ones wait, so that the line is out by then.
    """
    if int(os.environ.get("LOCAL_RANK", os.environ.get("HOROVOD_LOCAL_RANK", 0))) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)
    sys.exit(2)
