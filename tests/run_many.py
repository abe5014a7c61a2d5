"""Runs several main.py one after another in the processes that a launcher has started: importing PyTorch takes longest.

torchrun --nproc_per_node=2 tests/run_many.py RUNS.json        # [[port, script, option, ...], ...]

port: a free one for each run, where its processes meet: torchrun's own meeting place serves for one run only.
"""

import json
import os
import runpy
import sys

with open(sys.argv[1]) as file:
    runs = json.load(file)
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
for port, *sys.argv in runs:
    os.environ["MASTER_PORT"] = str(port)
    runpy.run_path(sys.argv[0], run_name="__main__")
