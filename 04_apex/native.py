"""Method 4 today: mixed precision by torch.amp. What NVIDIA moved Apex's users to, under torchrun as method 2.

autocast runs the matrix work in 16 bits, float16 on GPUs, bfloat16 on CPUs that can, and keeps the weights in 32. The
gradients of float16 underflow to zero, unless GradScaler scales the loss up before backward and them down again after.

    torchrun --nproc_per_node=2 04_apex/native.py
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=HOST0 --master_port=29500 04_apex/native.py
"""

import argparse
import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, for common/
from common.data import build_datasets
from common.errors import check_start, number, one_line_errors, refuse, require
from common.model import build_model, check_model, read_checkpoint


def parse_args():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.error = refuse  # one line, from one process
    add = parser.add_argument
    add("--data", default="digits", help="digits (built in), fake, or a folder with train/<class>/ and val/<class>/")
    add("--arch", help="cnn or any torchvision classification model (default: cnn for digits, else resnet18)")
    add("--pretrained", action="store_true", help="start from torchvision's ImageNet weights")
    add("--image-size", type=number(1), help="in pixels (default: 8 for digits, else 224)")
    add("--epochs", type=number(1), default=12)
    add("--batch-size", type=number(1), default=64, help="global: shared out among all processes")
    add("--lr", type=number(0.0), default=0.05, help="a tenth after 30 epochs, and so on; --resume keeps the old one")
    add("--momentum", type=number(0.0, 1.0), default=0.9)
    add("--weight-decay", type=number(0.0), default=5e-4)
    add("--workers", type=number(0), default=2, help="data loading processes, for each loader of each process")
    add("--seed", type=number(0, 2**32 - 1), default=0)
    add("--dtype", choices=["float32", "float64"], default="float32")
    add("--output", type=Path, default=Path("runs", Path(__file__).parent.name), help="gets last.pt, best.pt, metrics")
    add("--resume", nargs="?", const=True, help="a checkpoint; alone: <output>/last.pt, or from the start without one")
    add("--evaluate", action="store_true", help="validate and exit")
    add("--max-steps", type=number(1), help="stop each epoch after that many steps")
    add("--compile", action="store_true", help="have torch.compile make the network faster, which takes a minute")
    add("--timeout", type=number(1), default=600, help="seconds to wait for another process before giving up")
    add("--backend", choices=["gloo", "nccl"][: 1 + torch.cuda.is_available()], help="default: nccl with GPUs")
    fast = torch.cuda.is_available() or "bf16" in Path("/proc/cpuinfo").read_text()  # other CPUs are slower with it
    add("--amp", action=argparse.BooleanOptionalAction, default=fast, help="mixed precision (default: where it pays)")
    add("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    args = parser.parse_args()
    args.arch = args.arch or ("cnn" if args.data == "digits" else "resnet18")
    args.image_size = args.image_size or (8 if args.data == "digits" else 224)
    return args


@one_line_errors
def main():
    args = parse_args()
    args.dtype = getattr(torch, args.dtype)

    # Processes and devices
    cuda = torch.cuda.is_available()
    local_rank, backend = args.local_rank, args.backend or ("nccl" if cuda else "gloo")  # (1) the launcher's LOCAL_RANK
    check_start(args, cuda, __doc__)
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))  # (2) wait until all processes are there
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # (3) one GPU per process
        torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True  # TF32 rounds to 10 bits

    # Data: the sampler shuffles alike in every process and deals the images out, one to each in turn
    require(args.batch_size % world_size == 0, f"--batch-size: must be a multiple of {world_size} (processes)")
    check_model(args, args.batch_size // world_size)  # before the data, which may take a minute to list
    train_set, val_set = build_datasets(args.data, args.image_size, args.seed)
    require(args.batch_size <= len(train_set), f"--batch-size: must be at most {len(train_set)} (images)")
    kwargs = {"batch_size": args.batch_size // world_size, "num_workers": args.workers, "pin_memory": cuda}
    kwargs |= {"generator": torch.Generator()}  # the loaders draw from it, not from the numbers that dropout uses
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # (4) this rank's share
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, persistent_workers=args.workers > 0, **kwargs)
    # Not for validation: the sampler gives all ranks equally many, and repeats or drops images to do so.
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), **kwargs)

    # Model, optimizer, schedule
    torch.manual_seed(args.seed)
    model = build_model(args.arch, len(train_set.classes), args.pretrained)
    model = model.to(device, args.dtype, memory_format=torch.channels_last)  # convolutions prefer it to NCHW
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and cuda)  # (4a) bfloat16 does not underflow
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)  # (5) average the gradients
    parallel.broadcast_buffers = False  # once an epoch will do: see (6). An attribute, as the argument is deprecated
    if args.compile:
        parallel.compile()  # in place: the names of its weights stay as they are
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    if rank == 0:
        print(f"torch.amp {'on' if args.amp else 'off'}, processes: {world_size} ({device.type}, {dist.get_backend()})")
        print(f"{args.data}: {len(train_set)} images for training, {len(val_set)} for validation; {args.arch}")
        print(f"batches of {args.batch_size}, {kwargs['batch_size']} per process; results: {args.output.resolve()}")

    # Resume
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}  # model, not parallel: plain names
    parts |= {"scaler": scaler} if scaler.is_enabled() else {}  # (5a) the loss scale
    best_top1, history = -1.0, []
    if args.resume is not None and (checkpoint := load_checkpoint(args, rank, parts, train_set.classes)):
        for name in [name for name in parts if name in checkpoint]:  # another method's may lack amp's state
            parts[name].load_state_dict(checkpoint[name])
        best_top1, history = checkpoint["best_top1"], checkpoint["history"]
        if rank == 0 and len(history) >= args.epochs and not args.evaluate:
            print(f"nothing to train: {len(history)} of {args.epochs} epochs are done", flush=True)
    if args.evaluate:
        result = evaluate(model, val_loader, device, args)
        args.epochs = 0
        if rank == 0:
            line = "val loss {val_loss:.6f}  top-1 {top1:.2f} %  top-5 {top5:.2f} %  ({val_images} images)"
            print(line.format(**result), flush=True)

    # Train, validate, save
    for epoch in range(len(history), args.epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # another order
        train_set.set_epoch(epoch)  # other crops
        torch.manual_seed(args.seed + 1000 * epoch + rank)  # other dropout, and after --resume the same again
        result = {"epoch": epoch + 1, "processes": world_size, "lr": scheduler.get_last_lr()[0]}
        result |= train_one_epoch(parallel, train_loader, optimizer, scaler, device, rank, epoch, args)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # (6) batch norm's statistics: ranks' differ, rank 0's are saved
        result |= evaluate(model, val_loader, device, args)
        result["seconds"] = time.perf_counter() - start
        scheduler.step()
        finite = math.isfinite(result["train_loss"] + result["val_loss"])
        require(finite, f"the loss of epoch {epoch + 1} is not finite: not saved. Start afresh with a lower --lr")
        if rank == 0:
            line = "epoch {epoch}  train loss {train_loss:.4f}  val loss {val_loss:.4f}  top-1 {top1:.2f} %"
            print((line + "  top-5 {top5:.2f} %  {images_per_second:.0f} images/s").format(**result), flush=True)
            best_top1, history = max(best_top1, result["top1"]), [*history, result]
            checkpoint = {"epoch": epoch + 1, "best_top1": best_top1, "history": history, "arch": args.arch}
            checkpoint |= {name: part.state_dict() for name, part in parts.items()}
            save_checkpoint(checkpoint | {"classes": train_set.classes, "command": sys.argv}, args.output)
    dist.destroy_process_group()  # (7) leave together


def train_one_epoch(model, loader, optimizer, scaler, device, rank, epoch, args):
    """Returns the mean loss over all processes' images, and how many images a second all of them trained on."""
    model.train()
    steps = min(len(loader), args.max_steps or len(loader))
    sums, start = torch.tensor([0, steps], dtype=torch.float64, device=device), time.perf_counter()  # loss, steps
    bar = tqdm(zip(range(1, steps + 1), loader), total=steps, unit="step", leave=False, disable=rank > 0 or None)
    for step, (images, labels) in bar:  # range first: it ends without one batch too many
        images = images.to(device, args.dtype, memory_format=torch.channels_last, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, enabled=args.amp):  # (5b) 16 bits where that is safe
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # (5c) keep small gradients above zero
        scaler.step(optimizer)  # (5d) scale them back; no step if one has overflowed
        scaler.update()  # (5e) smaller after that, larger after 2,000 good steps
        sums[0] += loss.detach()
        if rank == 0 and step % (50 if bar.disable else 10) == 0:  # not always: reading the loss waits for the GPU
            speed = step * args.batch_size / (time.perf_counter() - start)
            line = f"epoch {epoch + 1}  step {step}/{steps}  loss {sums[0].item() / step:.4f}  {speed:.0f} images/s"
            print(line, flush=True) if bar.disable else bar.set_description(line)
    dist.all_reduce(sums)  # (8) once an epoch
    train_loss = (sums[0] / sums[1]).item()
    return {"train_loss": train_loss, "images_per_second": steps * args.batch_size / (time.perf_counter() - start)}


@torch.no_grad()
def evaluate(model, loader, device, args):
    """Returns loss, top-1, top-5 (%) over all processes' shares; not with DDP's model, whose ranks must go in step."""
    model.eval()
    sums = torch.tensor([0, 0, 0, len(loader.dataset)], dtype=torch.float64, device=device)  # loss, top-1, top-5
    for images, labels in loader:
        images = images.to(device, args.dtype, memory_format=torch.channels_last, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        output = model(images)
        right = output.topk(min(5, output.shape[1])).indices == labels[:, None]  # images x guesses
        sums[0] += F.cross_entropy(output, labels, reduction="sum")
        sums[1] += right[:, 0].sum()
        sums[2] += right.sum()
    dist.all_reduce(sums)  # (9) sums, not averages: shares and last batches differ in size
    loss, top1, top5, count = sums.tolist()
    return {"val_loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count, "val_images": int(count)}


def save_checkpoint(checkpoint, output):
    """Writes metrics.jsonl, best.pt, last.pt: each aside, then renamed: a killed run leaves the old or the new."""
    best = checkpoint["best_top1"] == checkpoint["history"][-1]["top1"]
    names = ["metrics.jsonl", "best.pt", "last.pt"] if best else ["metrics.jsonl", "last.pt"]
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "metrics.jsonl.tmp").write_text("".join(json.dumps(line) + "\n" for line in checkpoint["history"]))
        for name in names[1:]:
            torch.save(checkpoint, output / f"{name}.tmp")
        for name in names:  # only now that all are complete
            os.replace(output / f"{name}.tmp", output / name)
    except (OSError, RuntimeError) as error:  # a full disk, for example
        for name in names:
            (output / f"{name}.tmp").unlink(missing_ok=True)
        refuse(f"--output: cannot write to {output}, its last.pt is still the previous one: {error}")


def load_checkpoint(args, rank, parts, classes):
    """Returns the checkpoint that --resume asks for, None for a fresh start. Rank 0 reads it for all processes."""
    message = [read_checkpoint(args, parts, classes) if rank == 0 else None]
    dist.broadcast_object_list(message)  # (10) from rank 0
    require(not isinstance(message[0], str), message[0])  # why not
    return message[0]


if __name__ == "__main__":
    main()
