"""The three kinds of data that every main.py can train on: built-in digits, any ImageFolder tree, synthetic images."""

import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset

from common.errors import refuse, some

DIGITS = Path(__file__).resolve().parents[1] / "data" / "digits"


def build_datasets(data, image_size, seed=0):
    """Returns (train_set, val_set), whose items are (image, label).

    data: "digits", "fake", or a directory with train/<class>/*.jpg and val/<class>/*.jpg, as ImageNet's.
    image_size: height and width of every image, in pixels.
    image: float32, (3, image_size, image_size), normalised channel by channel; label: int.
    Both sets have `classes`, the names in the order of the labels; train_set has `set_epoch`.
    A directory that is not such a tree ends the process with status 2. Hidden files and folders are left out.
    """
    size = image_size
    if data == "fake":
        return FakeImages(12_800, size, seed), FakeImages(512, size, seed + 1)
    digits = data == "digits"
    root = digits_folder() if digits else Path(data)
    check_folders(root)
    from torchvision.transforms import v2  # not above: it takes two seconds, which --help and 03's parent can save

    from common.images import Images

    if digits:  # a mirrored or cropped digit may be another digit, or none
        train_transform = val_transform = v2.Resize((size, size))
    else:  # ImageNet's usual augmentation, and its evaluation crop: the middle 7/8 (224 of 256)
        train_transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
        val_transform = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size)])
    train_set, val_set = Images(root / "train", train_transform, seed), Images(root / "val", val_transform, seed)
    if train_set.classes != val_set.classes:  # labels are positions in this list
        different = sorted(set(train_set.classes) ^ set(val_set.classes))
        refuse(f"--data: train/ and val/ in {root} have different classes: {some(different)} in one of them only")
    return train_set, val_set


def check_folders(root):
    """Refuses a data folder without train/ and val/, and says what it looks like."""
    wanted = "wanted: digits, fake, or a folder with train/<class>/ and val/<class>/ in it"
    if not root.exists():
        refuse(f"--data: there is no {root}; {wanted}")
    missing = [split for split in ("train", "val") if not (root / split).is_dir()]
    if not root.is_dir() or missing:
        what = f"has no folder {' and no folder '.join(missing)}" if root.is_dir() else "is a file"
        above = root.absolute().parent
        hint = f"; did you mean {above}?" if (above / "train").is_dir() and (above / "val").is_dir() else ""
        refuse(f"--data: {root} {what}; {wanted}{hint}")


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
        if len(list(DIGITS.glob("*/*/*.png"))) < 1797:
            refuse(f"--data digits: files are missing from {DIGITS}: remove that folder, it will be made again")
        return DIGITS
    from sklearn.datasets import load_digits  # not above: it takes a second, and is needed once
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
