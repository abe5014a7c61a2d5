"""The networks that every main.py can train: a small one for small images, and all of torchvision's classifiers."""

import torchvision
from torch import nn

from common.data import refuse


def build_model(arch, num_classes, pretrained=False):
    """Returns the network `arch` for images (batch, 3, height, width) and logits (batch, num_classes).

    arch: "cnn", or the name of any torchvision classification model.
    pretrained: start from torchvision's ImageNet weights. The last layer stays random unless num_classes is 1,000.
    An unknown name, and weights that cannot be downloaded, end the process with status 2.
    """
    if arch == "cnn":
        if pretrained:
            refuse("--pretrained: there are no pretrained weights for cnn; choose a torchvision model with --arch")
        return cnn(num_classes)
    if arch not in torchvision.models.list_models(module=torchvision.models):
        refuse(f"--arch: {arch} is neither cnn nor a classification model of torchvision {torchvision.__version__}")
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
