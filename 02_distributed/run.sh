#!/usr/bin/env bash
# Trains with torch.distributed, one process per GPU, or two on the CPU:
#
#     bash 02_distributed/run.sh [options of main.py]
#     NPROC=4 bash 02_distributed/run.sh                # four processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"
share_cores "$NPROC"
exec torchrun --standalone --nproc_per_node="$NPROC" "$here/main.py" "$@"
