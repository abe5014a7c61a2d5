#!/usr/bin/env bash
# Trains with nn.DataParallel, one process on all GPUs, or on the CPU:
#
#     bash 01_dataparallel/run.sh [options of main.py]
#     NPROC=2 bash 01_dataparallel/run.sh               # on the first two GPUs
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"
[ "$NNODES" = 1 ] || refuse "NNODES: nn.DataParallel is one process on one machine; 02 to 05 take several"
share_cores 1
if [ "$NPROC" -lt "$GPUS" ]; then
  export CUDA_VISIBLE_DEVICES=$(cut -d, -f "1-$NPROC" <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((GPUS - 1)))}")
fi
supervise python3 "$here/main.py" "$@"
