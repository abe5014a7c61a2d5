"""The three kinds of data that every main.py can train on: built-in digits, any ImageFolder tree, synthetic images."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from common.errors import BrokenFile, note, refuse

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
    if digits:  # a mirrored or cropped digit may be another digit, or none
        train_transform = val_transform = v2.Resize((size, size))
    else:  # ImageNet's usual augmentation, and its evaluation crop: the middle 7/8 (224 of 256)
        train_transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
        val_transform = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size)])
    check_folders(root)
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


def some(names):
    """Returns the first few of the names as text."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Images(ImageFolder):
    """An ImageFolder whose random augmentation depends on (seed, epoch, image) and on nothing else.

    An image's crop in an epoch is then the same whichever process or worker reads it: methods with different numbers
    of processes train on the same images, and a resumed run sees what an uninterrupted one would have seen.
    """

    def __init__(self, root, transform, seed):
        self.hidden = []
        # ImageNet's mean and standard deviation, R G B; https://pytorch.org/vision/stable/models.html
        normalize = v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        transform = v2.Compose([transform, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize])
        super().__init__(root, transform, loader=load_image, is_valid_file=self.is_image, allow_empty=True)
        if self.hidden:
            note(f"--data: hidden files and folders are left out: {some(self.hidden)}")
        if empty := sorted(set(range(len(self.classes))) - set(self.targets)):
            names = some([self.classes[label] for label in empty])
            refuse(f"--data: no images in these folders of {root}: {names}. Wanted: {' '.join(IMG_EXTENSIONS)}")
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # seen by workers that are already running

    def find_classes(self, directory):
        """Returns the folders' names, sorted, and their labels: as ImageFolder's does, but without the hidden ones."""
        folders = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        classes = [name for name in folders if not (name.startswith(".") or name == "__MACOSX")]
        self.hidden += [name for name in folders if name not in classes]  # .ipynb_checkpoints, a Mac's archives'
        if not classes:
            refuse(f"--data: no folders in {directory}; wanted: one for each class, with the images in it")
        return classes, {name: label for label, name in enumerate(classes)}

    def is_image(self, path):
        hidden = "/." in path[len(str(self.root)) :]  # as a Mac's ._cat.jpg, which is no image
        if hidden:
            self.hidden.append(path)
        return not hidden and path.lower().endswith(IMG_EXTENSIONS)

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


def load_image(path):
    """Returns the image in a file, whatever its format, upright and in RGB. Raises BrokenFile, which names the file."""
    try:
        with Image.open(path) as image:
            with contextlib.suppress(Exception):  # what else is in the EXIF data may be broken, and does not matter
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I"):  # 16 bits of grey, all but the darkest of which convert() would make white
                image = Image.fromarray((np.asarray(image) // 256).astype("uint8"))
            if "transparency" in image.info:
                image = image.convert("RGBA")
            return image.convert("RGB")
    except Exception as error:  # Pillow has a dozen of them
        raise BrokenFile(f"--data: cannot read {path}: {error}") from None


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
