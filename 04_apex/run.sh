#!/usr/bin/env bash
# Trains in mixed precision, one process per GPU, or two on the CPU: with Apex where it is installed, else with native.py:
#
#     bash 04_apex/run.sh [options of main.py or native.py]
#     NPROC=4 bash 04_apex/run.sh                       # four processes
#     MAX_RESTARTS=3 bash 04_apex/run.sh            # with --resume: go on up to three times after a crash
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST0 MASTER_PORT=29500 bash 04_apex/run.sh      # on HOST0; NODE_RANK=1 on HOST1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"
share_cores "$NPROC"

# Is there an Apex with amp?
why=$(
  python3 - 2>/dev/null <<'PYTHON'
import importlib.util

if importlib.util.find_spec("apex") is None:
    print("no apex is installed")
else:
    try:
        from apex import amp, parallel
    except Exception as error:
        print(f"the apex that is installed cannot be used ({error})")
PYTHON
)
script=main.py
if [ -n "$why" ]; then
  echo "04_apex: $why: running native.py, PyTorch's own mixed precision, in its place" >&2
  script=native.py
fi
choose_rendezvous
supervise torchrun "${RENDEZVOUS[@]}" --nproc_per_node="$NPROC" --max-restarts="$MAX_RESTARTS" "$here/$script" "${RESUME[@]}" "$@"
