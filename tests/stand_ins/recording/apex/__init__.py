"""Stand-in for NVIDIA's Apex: computes nothing, and appends the calls of 04_apex/main.py to the file $APEX_CALLS.

It shows the order of the calls; that real Apex works is shown only where one is installed (tests/test_apex.py).
"""

import os

import torch
from torch.nn.parallel import DistributedDataParallel


def record(call):
    with open(os.environ["APEX_CALLS"], "a") as file:
        file.write(call + "\n")


def recorded(owner, name, call):
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        record(call)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


recorded(torch.optim.SGD, "__init__", "optimizer")
recorded(DistributedDataParallel, "__init__", "DDP")
recorded(torch.Tensor, "backward", "backward")
