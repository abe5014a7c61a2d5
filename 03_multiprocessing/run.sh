#!/usr/bin/env bash
# Trains with torch.multiprocessing, one process per GPU, or two on the CPU:
#
#     bash 03_multiprocessing/run.sh [options of main.py]
#     NPROC=4 bash 03_multiprocessing/run.sh            # four processes
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST0 MASTER_PORT=29500 bash 03_multiprocessing/run.sh  # on HOST0; NODE_RANK=1 on HOST1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"
share_cores "$NPROC"
[[ $NNODES != *:* ]] || refuse "NNODES: 03 takes one number: nobody restarts its processes when machines come and go"
machines=()
[ "$NNODES" = 1 ] || machines=(--world-size "$NNODES" --rank "$NODE_RANK" --dist-url "tcp://$MASTER_ADDR:$MASTER_PORT")
supervise python3 "$here/main.py" --nprocs "$NPROC" "${machines[@]}" "$@"
