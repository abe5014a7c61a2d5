#!/usr/bin/env bash
# What the CPU tests cannot try, on one GPU and without a network, meant to take less than 8 minutes (not yet run on
# one); a short table comes last:
#
#     bash tests/gpu_check.sh
#
# Needs the environment of run_all.sh. What is not installed there (Apex, Horovod with NCCL) is said not to have run.
# Ends with status 1 if anything failed. Its speeds are of one GPU, on images that lie in its memory.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source common/env.sh
[ "$GPUS" -gt 0 ] || refuse "gpu_check.sh: there is no GPU here"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
gpu=${CUDA_VISIBLE_DEVICES:-0}
gpu=${gpu%%,*} # one, even where there are more
table=$folder/table failed=0
FLOAT32=(env NVIDIA_TF32_OVERRIDE=0) # or GPUs round float32's factors to 10 bits
STEP=(--epochs 1 --max-steps 1 --workers 0) # of the small cnn, on digits
RESNET=("${STEP[@]}" --data digits --arch resnet18 --image-size 32)

say() { printf '%-58s %s\n' "$1" "$2" | tee -a "$table"; }

# $1: what is tried. $2...: a command, of which the end is shown if it fails.
try() {
  if timeout 120 "${@:2}" >"$folder/log" 2>&1; then
    say "$1" ok
  else
    say "$1" "FAILED: $(grep -i error "$folder/log" | head -n 1)"
    tail -n 20 "$folder/log" >&2
    failed=1
    return 1
  fi
}

# Says how much the weights of two runs differ.
compare() {
  python3 - "$@" >"$folder/log" 2>&1 <<'PYTHON'
import sys

sys.path.insert(0, ".")
import torch
from common.report import weight_difference

difference = weight_difference(*(torch.load(f"{run}/last.pt", "cpu", weights_only=True) for run in sys.argv[1:]))
print(f"{difference:.1e}")
sys.exit(not difference <= 1e-4)
PYTHON
  local bad=$?
  say "    beside the CPU" "$( ((bad)) && echo FAILED:) $(tail -n 1 "$folder/log")"
  ((bad)) && failed=1
}

has() { python3 -c "import $1" 2>/dev/null; }

say "One step in float32: largest difference of a weight" "(at most 1e-4)"
export CUDA_VISIBLE_DEVICES=
try "02_distributed, cnn and resnet18 on the CPU, for comparison" bash -ec '
  NPROC=1 bash 02_distributed/run.sh "${@:2}" --output "$1/cpu-cnn"
  NPROC=1 bash 02_distributed/run.sh "${@:2}" --output "$1/cpu-resnet" --data digits --arch resnet18 --image-size 32
' _ "$folder" "${STEP[@]}"
export CUDA_VISIBLE_DEVICES=$gpu
methods=(01_dataparallel 02_distributed 03_multiprocessing)
if has horovod.torch; then methods+=(05_horovod); else say "05_horovod" "not run: no Horovod is installed"; fi
for method in "${methods[@]}"; do
  try "$method, resnet18" "${FLOAT32[@]}" NPROC=1 bash "$method/run.sh" "${RESNET[@]}" --output "$folder/$method" &&
    compare "$folder/cpu-resnet" "$folder/$method"
done
try "04_apex/native.py --no-amp, resnet18" "${FLOAT32[@]}" torchrun --standalone --nproc_per_node=1 04_apex/native.py \
  --no-amp "${RESNET[@]}" --output "$folder/native" && compare "$folder/cpu-resnet" "$folder/native"
# NCCL wants a GPU for every process, gloo does not: two machines of one process, on this one.
for script in 02_distributed/main.py "04_apex/native.py --no-amp"; do
  try "$script, cnn, two processes on the GPU (gloo)" "${FLOAT32[@]}" bash -c '
    for rank in 0 1; do
      torchrun --nnodes=2 --node_rank=$rank --nproc_per_node=1 --master_addr=127.0.0.1 --master_port=$1 "${@:2}" &
    done
    wait -n && wait -n' _ $((20000 + RANDOM % 10000)) $script --backend gloo "${STEP[@]}" --output "$folder/pair" &&
    compare "$folder/cpu-cnn" "$folder/pair"
  rm -rf "$folder/pair"
done

if has apex.amp; then
  try "04_apex/main.py --opt-level O0, resnet18" "${FLOAT32[@]}" torchrun --standalone --nproc_per_node=1 04_apex/main.py \
    --opt-level O0 "${RESNET[@]}" --output "$folder/apex" && compare "$folder/cpu-resnet" "$folder/apex"
fi

say "Mixed precision, 20 steps of the cnn" ""
try "04_apex/native.py, float16 with its scaler" torchrun --standalone --nproc_per_node=1 04_apex/native.py \
  --epochs 1 --max-steps 20 --output "$folder/amp"
if has apex.amp; then
  for level in O0 O1 O2; do
    try "04_apex/main.py --opt-level $level" torchrun --standalone --nproc_per_node=1 04_apex/main.py \
      --epochs 1 --max-steps 20 --opt-level $level --output "$folder/$level"
  done
else
  say "04_apex/main.py" "not run: no Apex is installed"
fi

say "Training resnet50 at 224 pixels, synthetic images, batch 128" "(images/s, peak GPU memory)"
python3 - "$table" <<'PYTHON' || failed=1
import sys
import time

import torch
import torch.nn.functional as F
import torchvision

BATCH, SIZE, STEPS = 128, 224, 20


def measure(name, tf32=True, layout=torch.channels_last, dtype=None, compiled=False):
    torch.cuda.reset_peak_memory_stats()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.manual_seed(0)
    model = torchvision.models.resnet50().cuda().to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    images = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda").to(memory_format=layout)
    labels = torch.randint(1000, (BATCH,), device="cuda")
    if compiled:
        model.compile()
    for step in range(5 + STEPS):
        if step == 5:
            torch.cuda.synchronize()
            start = time.perf_counter()
        with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()
    speed = BATCH * STEPS / (time.perf_counter() - start)
    line = f"    {name:54} {speed:,.0f}, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    print(line, flush=True)
    with open(sys.argv[1], "a") as table:
        print(line, file=table)
    assert loss.isfinite()


measure("float32", tf32=False, layout=torch.contiguous_format)
measure("TF32", layout=torch.contiguous_format)
measure("TF32, channels_last: what the five scripts do")
measure("the same, compiled", compiled=True)
measure("float16 with a scaler, channels_last: native.py", dtype=torch.float16)
measure("bfloat16, channels_last", dtype=torch.bfloat16)
measure("float16, compiled", dtype=torch.float16, compiled=True)
PYTHON
timeout 200 python3 common/bench.py "$folder" --rounds 1 --steps 20 --arch resnet50 --image-size 224 --batch-size 128 \
  2>&1 | tee -a "$table" || failed=1

printf '\n== %s, %d s\n' "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)" "$SECONDS"
cat "$table"
exit "$failed"
