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
# Without GPUs the processes' cores are theirs to compute with. Horovod's default, to ask each other for finished gradients
# every millisecond, took about a tenth of a step of 1.4 s (resnet18 at 128 pixels, two processes on two cores), and every
# 10 ms, with up to 128 MB copied together, still 5 % more than this. Steps of less than 0.1 s lose a tenth by waiting.
[ "$GPUS" != 0 ] || export HOROVOD_CYCLE_TIME=${HOROVOD_CYCLE_TIME:-25} HOROVOD_FUSION_THRESHOLD=${HOROVOD_FUSION_THRESHOLD:-1048576}
supervise horovodrun --gloo -np "$(($(paste -sd+ <<<"$slots")))" -H "$HOSTS" "$(command -v python3)" "$here/main.py" "$@"
