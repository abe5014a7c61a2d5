#!/usr/bin/env bash
# Trains with torch.distributed, one process per GPU, or two on the CPU:
#
#     bash 02_distributed/run.sh [options of main.py]
#     NPROC=4 bash 02_distributed/run.sh                # four processes
#     MAX_RESTARTS=3 bash 02_distributed/run.sh            # with --resume: go on up to three times after a crash
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST0 MASTER_PORT=29500 bash 02_distributed/run.sh      # on HOST0; NODE_RANK=1 on HOST1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"
share_cores "$NPROC"
choose_rendezvous
supervise torchrun "${RENDEZVOUS[@]}" --nproc_per_node="$NPROC" --max-restarts="$MAX_RESTARTS" "$here/main.py" "${RESUME[@]}" "$@"
