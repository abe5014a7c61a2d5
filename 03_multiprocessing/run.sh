#!/usr/bin/env bash
# Trains with torch.multiprocessing, one process per GPU, or two on the CPU:
#
#     bash 03_multiprocessing/run.sh [options of main.py]
#     NPROC=4 bash 03_multiprocessing/run.sh            # four processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"
share_cores "$NPROC"
supervise python3 "$here/main.py" --nprocs "$NPROC" "$@"
