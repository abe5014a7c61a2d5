"""The other limit of run_all.sh --bench --data DIR: all cores read images, and nobody trains on them.

python3 decoding.py DIR IMAGE_SIZE BATCH_SIZE WORKERS BATCHES prints how many images a second that gives.
"""

import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader, RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.data import build_datasets

folder, (size, batch_size, workers, batches) = sys.argv[1], map(int, sys.argv[2:])
train_set, _ = build_datasets(folder, size)
sampler = RandomSampler(train_set, replacement=True, num_samples=10**9)  # without an end
loader = iter(DataLoader(train_set, batch_size, sampler=sampler, num_workers=workers))
for _ in range(2 * workers):  # those that lie ready when the clock starts
    next(loader)
start = time.perf_counter()
for _ in range(batches):
    next(loader)
print(batches * batch_size / (time.perf_counter() - start))
