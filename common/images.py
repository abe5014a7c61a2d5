"""Folders of image files as a data set."""

import contextlib
import os

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from common.errors import BrokenFile, note, refuse, some


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
