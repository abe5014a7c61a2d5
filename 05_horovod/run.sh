#!/usr/bin/env bash
# Trains with Horovod, one process per GPU, or two on the CPU (after install.sh):
#
#     bash 05_horovod/run.sh [options of main.py]
#     NPROC=4 bash 05_horovod/run.sh                    # four processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"
share_cores "$NPROC"
supervise horovodrun --gloo -np "$NPROC" -H "localhost:$NPROC" python3 "$here/main.py" "$@"
