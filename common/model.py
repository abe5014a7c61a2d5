"""The networks that every main.py can train: a small one for small images, and all of torchvision's classifiers."""

import difflib
from pathlib import Path

import torch
from torch import nn

from common.errors import refuse


def build_model(arch, num_classes, pretrained=False):
    """Returns the network `arch` for images (batch, 3, height, width) and logits (batch, num_classes).

    arch: "cnn", or the name of any torchvision classification model.
    pretrained: start from torchvision's ImageNet weights. The last layer stays random unless num_classes is 1,000.
    Weights that cannot be downloaded end the process with status 2.
    """
    import torchvision  # not above: see data.py

    if arch == "cnn":
        return cnn(num_classes)
    options = {}
    if arch in ("googlenet", "inception_v3"):  # their extra outputs, for the loss only, would need a loop of their own
        options = {"aux_logits": False, "init_weights": not pretrained, "transform_input": pretrained}
    model = torchvision.models.get_model(arch, num_classes=num_classes, **options)
    if pretrained:
        try:
            weights = torchvision.models.get_model_weights(arch).DEFAULT.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, no such host; a broken download
            refuse(f"--pretrained: cannot download the weights of {arch}: {error}")
        own = model.state_dict()
        fitting = {name: value for name, value in weights.items() if name in own and value.shape == own[name].shape}
        model.load_state_dict(fitting, strict=False)
    return model


def check_model(args, batch_size):
    """Refuses an --arch that there is not, and a network that cannot take the images.

    args: arch, pretrained, image_size, evaluate. batch_size: of one process.
    The network is tried on PyTorch's meta device, which has shapes but no numbers, and so costs no more than a moment.
    """
    import torchvision

    names = ["cnn", *torchvision.models.list_models(module=torchvision.models)]
    if args.arch not in names:
        near = difflib.get_close_matches(args.arch, names)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        version = torchvision.__version__
        refuse(f"--arch: {args.arch} is neither cnn nor a classification model of torchvision {version}{hint}")
    if args.arch == "cnn" and args.pretrained:
        refuse("--pretrained: there are no pretrained weights for cnn; choose a torchvision model with --arch")
    try:
        with torch.device("meta"):
            model = build_model(args.arch, 10)
    except NotImplementedError:  # the regnets calculate with tensors while they are made
        model = build_model(args.arch, 10).to("meta")
    model.train(not args.evaluate)

    def problem(images, size):
        try:
            with torch.no_grad():
                model(torch.empty(images, 3, size, size, device="meta"))
        except (RuntimeError, ValueError, AssertionError) as error:
            return str(error).splitlines()[0]

    if reason := problem(batch_size, args.image_size):
        if batch_size == 1 and not problem(2, args.image_size):
            refuse(f"--batch-size: {args.arch} has batch norm, which needs two images or more per process to train")
        nearest = sorted(range(1, 601), key=lambda size: abs(size - args.image_size))
        fitting = next((size for size in nearest if not problem(max(2, batch_size), size)), None)
        hint = f", but it can {fitting}" if fitting else ""
        refuse(f"--image-size: {args.arch} cannot take {args.image_size} pixels{hint} ({reason})")


def read_checkpoint(args, parts, classes):
    """Returns the checkpoint that --resume asks for, None if there is none yet, or, as text, why it cannot be used.

    args: resume, output, evaluate, arch. parts: the model, optimizer, ... it is for. classes: the data's.
    For --evaluate the weights alone will do, as a bare state dict, as pytorch/examples saves them ("state_dict"), or
    from DataParallel ("module." before each name). A checkpoint is used as a whole or not at all, and no code that
    its file may bring along is run (weights_only). Says what it does: called by one process only.
    """
    path = args.output / "last.pt" if args.resume is True else Path(args.resume)
    if args.resume is True and not args.evaluate and not path.exists():
        print(f"starting afresh: there is no {path} yet", flush=True)
        return None
    if not path.is_file():
        return f"--resume: there is no file {path if args.resume else repr(args.resume)}"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        weights = checkpoint.get("model", checkpoint.get("state_dict", checkpoint))
        weights = {name.removeprefix("module."): weight for name, weight in weights.items()}
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())[:100]
        return f"--resume: {path} is truncated, no checkpoint, or one with code inside, which is not run ({reason})"
    if (arch := checkpoint.get("arch", args.arch)) != args.arch:
        return f"--resume: {path} is of --arch {arch}, not {args.arch}"
    stored = checkpoint.get("classes")
    if isinstance(stored, list) and stored != classes:  # another project's may mean something else by that name
        different = ", ".join(sorted(set(stored) ^ set(classes))[:5])
        return f"--resume: {path} has {len(stored)} classes, the data {len(classes)}; in one only: {different}, ..."
    own = {name: tuple(weight.shape) for name, weight in parts["model"].state_dict().items()}
    if own != shapes:
        misfits = [name for name in [*own, *shapes] if own.get(name) != shapes.get(name)]
        differ = ", ".join(misfits[:3])
        return f"--resume: {path} is not of {args.arch} with {len(classes)} classes: {differ}, ... differ"
    if args.evaluate:
        print(f"resuming from {path}", flush=True)
        return {"model": weights, "best_top1": -1.0, "history": []}
    if missing := [name for name in ("optimizer", "scheduler", "best_top1", "history") if name not in checkpoint]:
        return f"--resume: {path} has no {', '.join(missing)}: it can be used with --evaluate only"
    try:
        parts["optimizer"].load_state_dict(checkpoint["optimizer"])
        if "momentum" not in parts["optimizer"].param_groups[0]:
            raise ValueError("no momentum")
    except (KeyError, ValueError, TypeError) as error:
        return f"--resume: the optimizer in {path} is not SGD ({error}): it can be used with --evaluate only"
    print(f"resuming from {path}", flush=True)
    return checkpoint | {"model": weights}


def cnn(num_classes):
    """Returns a network for small images, (batch, 3, height, width), without max-pooling and batch norm.

    Max-pooling breaks ties over a digit's blank background by rounding noise, and so makes float32 runs of
    mathematically equal methods drift apart; convolutions and smooth activations do not. Batch norm would make the
    result depend on how a batch is shared out.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.GELU(),
        nn.Linear(128, num_classes),
    )
