"""The limit that run_all.sh --bench measures main.py against: forward, backward, step, and nothing else.

python3 bare.py ARCH IMAGE_SIZE BATCH_SIZE is the plain loop; under torchrun it is that of DistributedDataParallel. The
clock (probe.py) ends it.
"""

import os
import sys

import probe  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision

arch, size, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
cuda = torch.cuda.is_available()
device = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True
model = torchvision.models.get_model(arch, num_classes=1000).to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=5e-4)
if "RANK" in os.environ:
    dist.init_process_group("nccl" if cuda else "gloo")
    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
images = torch.randn(batch_size // world_size, 3, size, size, device=device).to(memory_format=torch.channels_last)
labels = torch.randint(1000, (batch_size // world_size,), device=device)
while True:
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
