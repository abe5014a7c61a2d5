"""The limit that run_all.sh --bench measures main.py against: forward, backward, step, and nothing else.

torchrun --nproc_per_node=N bare.py ARCH IMAGE_SIZE BATCH_SIZE; one process does without
DistributedDataParallel. The clock (probe.py) ends it.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.probe  # noqa: F401
from common.model import build_model

arch, size, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
cuda = torch.cuda.is_available()
device = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True
dist.init_process_group("nccl" if cuda else "gloo")
model = build_model(arch, 1000).to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=5e-4)
if world_size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    model.broadcast_buffers = False
images = torch.randn(batch_size // world_size, 3, size, size, device=device).to(memory_format=torch.channels_last)
labels = torch.randint(1000, (batch_size // world_size,), device=device)
while True:
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
