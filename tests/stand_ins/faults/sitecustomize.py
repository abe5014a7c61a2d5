"""A stand-in for a fault: with this folder on PYTHONPATH, one process goes wrong.

FAULT is "raise R S" (an exception on rank R after its step S), "stall R S" (it sleeps from there on), or "never R" (it
does not come to its first line).
"""

import os
import time

import tqdm

what, rank, *step = os.environ.get("FAULT", "none 0").split()
iterate = tqdm.tqdm.__iter__


def is_it():
    return rank == os.environ.get("RANK", os.environ.get("HOROVOD_RANK", os.environ.get("LOCAL_RANK")))


def faulty(bar):
    for count, item in enumerate(iterate(bar)):
        if is_it() and count == int(step[0]):
            if what == "raise":
                raise ZeroDivisionError("the fault of this test")
            time.sleep(1000)
        yield item


if what in ("raise", "stall"):
    tqdm.tqdm.__iter__ = faulty
elif what == "never" and is_it():
    time.sleep(1000)
