#!/usr/bin/env bash
# Trains with Horovod, one process per GPU, or two on the CPU (after install.sh):
#
#     bash 05_horovod/run.sh [options of main.py]
#     NPROC=4 bash 05_horovod/run.sh                    # four processes
#     HOSTS=HOST0:4,HOST1:4 bash 05_horovod/run.sh      # four on each of two machines, from the first of them, by ssh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"
[ "$NNODES" = 1 ] || refuse "NNODES: horovodrun starts the processes of all machines from the first one: HOSTS=HOST0:4,HOST1:4"
HOSTS=${HOSTS:-localhost:$NPROC}
[[ $HOSTS =~ ^[^:,\ ]+:[1-9][0-9]*(,[^:,\ ]+:[1-9][0-9]*)*$ ]] ||
  refuse "HOSTS: '$HOSTS' is no list of machines and their numbers of processes, such as HOST0:4,HOST1:4"
slots=$(grep -o ':[0-9]*' <<<"$HOSTS" | tr -d :)
share_cores "$(sort -n <<<"$slots" | tail -n 1)"
# Without GPUs the processes' cores are theirs to compute with. Horovod's defaults, to ask each other for finished gradients
# every millisecond and to copy them together up to 128 MB, took more than a tenth of a step of 1.4 s (resnet18 at 128
# pixels, two processes on two cores). Steps of less than 0.1 s lose as much by waiting: HOROVOD_CYCLE_TIME=10 suits them.
[ "$GPUS" != 0 ] || export HOROVOD_CYCLE_TIME=${HOROVOD_CYCLE_TIME:-25} HOROVOD_FUSION_THRESHOLD=${HOROVOD_FUSION_THRESHOLD:-1048576}
supervise horovodrun --gloo -np "$(($(paste -sd+ <<<"$slots")))" -H "$HOSTS" "$(command -v python3)" "$here/main.py" "$@"
