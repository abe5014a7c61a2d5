"""The pieces of code that the README gives for what the five scripts leave out."""

import re
import textwrap

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, launch

from common.model import build_model

ACCUMULATE, BATCHES, SIZE = 4, 10, 4  # batches per step, batches per epoch, images in each batch of a process
EPOCHS, STEPS = 2, 3  # steps per epoch, the last of two batches
COMMON = f"""
import contextlib, sys
import torch, torch.nn.functional as F
sys.path.insert(0, {str(ROOT)!r})
from common.model import build_model

torch.manual_seed(0)
model = build_model("cnn", 10).double()
optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
numbers = torch.Generator().manual_seed(1)
images = torch.randn({BATCHES}, 2, {SIZE}, 3, 8, 8, generator=numbers, dtype=torch.float64)
labels = torch.randint(10, ({BATCHES}, 2, {SIZE}), generator=numbers)
"""
TORCHRUN = """
import torch.distributed as dist, torch.distributed.nn  # see errors.py
dist.init_process_group("gloo")
rank, buckets = dist.get_rank(), []
parallel = torch.nn.parallel.DistributedDataParallel(model)
def hook(state, bucket):
    buckets.append(bucket.index())
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])
parallel.register_comm_hook(None, hook)
"""
HOROVOD = """
import horovod.torch as hvd
hvd.init()
rank = hvd.rank()
"""
END = """
if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
"""
LEAVE = """
del parallel  # it holds on to the process group, whose threads must be gone before Python is
dist.destroy_process_group()
"""


def snippet(words):
    """Returns the README's block of Python that contains these words."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if words in block]
    return found


def reference():
    """Returns the weights of one process that sees every step's images at once."""
    space = {}
    exec(COMMON, space)
    model, optimizer = space["model"], space["optimizer"]
    groups = zip(space["images"].split(ACCUMULATE), space["labels"].split(ACCUMULATE))
    for images, labels in EPOCHS * list(groups):
        loss = F.cross_entropy(model(images.flatten(0, 2)), labels.flatten()) * len(images) / ACCUMULATE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("words", ["no_sync", pytest.param("backward_passes_per_step", marks=pytest.mark.full)])
def test_accumulated_gradients(words, tmp_path):
    """Batches taken together are one large one; with no_sync only the last of them exchanges gradients."""
    torchrun = words == "no_sync"
    loader = "train_loader = list(zip(images[:, rank], labels[:, rank]))\n"
    check = f"assert buckets.count(0) == {EPOCHS * STEPS}, buckets\n" if torchrun else ""
    before, loop, after = snippet(words).partition("for step")
    training = f"{before}for epoch in range({EPOCHS}):\n{textwrap.indent(loop + after, '    ')}"
    script = tmp_path / "script.py"
    script.write_text(COMMON + (TORCHRUN if torchrun else HOROVOD) + loader + training + check + END + LEAVE * torchrun)
    start = (
        ["torchrun", "--standalone", "--nproc_per_node=2"]
        if torchrun
        else ["horovodrun", "--gloo", "-np", 2, "python3"]
    )
    result = launch(*start, script, tmp_path / "weights.pt")
    assert result.returncode == 0, result.output
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, value in reference().items():
        assert (weights[name] - value).abs().max() < 1e-12, name


def test_synchronized_batch_norm():
    """The conversion keeps weights and their names. Training with it takes GPUs, and is not tried."""
    space = {"torch": torch, "model": build_model("resnet18", 10)}
    before = space["model"].state_dict()
    exec(snippet("SyncBatchNorm"), space)
    after = space["model"]
    assert sum(isinstance(module, torch.nn.SyncBatchNorm) for module in after.modules()) == 20
    assert all(torch.equal(value, before[name]) for name, value in after.state_dict().items())
