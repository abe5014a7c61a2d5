# Sourced by the run.sh files and run_all.sh: which Python, how many processes, how many threads each, and how they end.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The active virtual or conda environment, else the repository's own (run_all.sh makes it), else the system's Python.
for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$root/.venv"; do
  if [ -n "$environment" ] && [ -x "$environment/bin/python3" ]; then
    export PATH="$environment/bin:$PATH"
    break
  fi
done

count_gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^-/,$d' | grep -c . || true # -1, and all after it, is none
  else
    (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU ' || true
  fi
}

refuse() {
  echo "error: $1" >&2
  exit 2
}

# Sets RESUME. $@: the script's options.
go_on() {
  [[ ! " $* " =~ \ --resume(=|\ +)[^-\ ] ]] ||
    refuse "--resume: a job that restarts by itself goes on from <output>/last.pt, not from another file: copy it there"
  RESUME=(--resume)
}

# One process per GPU; without a GPU two, so that there is something to see. NPROC is that of each machine.
GPUS=$(count_gpus)
NPROC=${NPROC:-$((GPUS > 0 ? GPUS : 2))}
MAX_RESTARTS=${MAX_RESTARTS:-0}
# The machines: how many (2, or from 1 to 2: 1:2), which of them this one is (0 is the first), and where to meet: the
# first one's name or address, and a port that is free there.
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
[[ $NPROC =~ ^[1-9][0-9]{0,3}$ ]] || refuse "NPROC: '$NPROC' is no number of processes"
[[ $MAX_RESTARTS =~ ^(0|[1-9][0-9]{0,3})$ ]] || refuse "MAX_RESTARTS: '$MAX_RESTARTS' is no number of restarts"
[[ $NNODES =~ ^([1-9][0-9]{0,3}:)?[1-9][0-9]{0,3}$ && ${NNODES%:*} -le ${NNODES#*:} ]] ||
  refuse "NNODES: '$NNODES' is no number of machines, such as 2, or 1:2 for one or two"
[[ $NODE_RANK =~ ^(0|[1-9][0-9]{0,3})$ && $NODE_RANK -lt ${NNODES#*:} ]] ||
  refuse "NODE_RANK: '$NODE_RANK' is none of 0 to $((${NNODES#*:} - 1)), with NNODES=$NNODES"
[[ $MASTER_PORT =~ ^[1-9][0-9]{0,4}$ && $MASTER_PORT -le 65535 ]] || refuse "MASTER_PORT: '$MASTER_PORT' is no port"
[[ $NNODES = 1 || ! $MASTER_ADDR =~ ^(127\..*|localhost|)$ ]] ||
  refuse "MASTER_ADDR: with NNODES=$NNODES, the first machine's name or address, which all machines can reach"
RESUME=() # what makes a restarted script go on from its last epoch
if [[ $MAX_RESTARTS -gt 0 || $NNODES = *:* ]]; then
  go_on "$@"
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or it may read addresses of dead processes: pytorch/pytorch#135712
fi
[ "$GPUS" = 0 ] || [ "$NPROC" -le "$GPUS" ] || refuse "NPROC: $NPROC processes, but only $GPUS GPUs, on this machine"
case " $* " in *" --help "* | *" -h "*) NPROC=1 ;; esac # says it once

# Without GPUs, have the C library keep memory that PyTorch frees, and ask for huge pages. Its defaults give every large
# tensor back, and the next step's then cost some 50,000 page faults: a tenth of the time (resnet18 at 128 pixels). The
# memory is 1.03 times as much. https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html
[ "$GPUS" != 0 ] || export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000:glibc.malloc.hugetlb=1}

# Sets the threads of each of $1 processes: an equal share of the cores. Left alone, each process would start a thread
# per core and they would fight (torchrun's own answer, one thread each, leaves cores idle when there are few processes).
share_cores() {
  local cores=${SLURM_CPUS_PER_TASK:-$(nproc)}
  local threads=$((cores / $1))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}

# Sets RENDEZVOUS, torchrun's options for where its processes meet: on one machine on a free port. On several machines
# NODE_RANK numbers them, unless they may come and go: then the ranks are dealt out anew each time (c10d).
choose_rendezvous() {
  RENDEZVOUS=(--standalone)
  [ "$NNODES" = 1 ] && return
  RENDEZVOUS=(--nnodes="$NNODES" --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT")
  if [[ $NNODES = *:* || $MAX_RESTARTS -gt 0 ]]; then
    RENDEZVOUS=(--nnodes="$NNODES" --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv_id="${here##*/}")
    # The first machine is the host, whatever its name, and can be started 10 minutes after the others. Once the least
    # number is there, the start waits for 15 seconds; a machine that comes later is taken in by a restart.
    RENDEZVOUS+=("--rdzv_conf=is_host=$((NODE_RANK == 0)),read_timeout=600,last_call_timeout=15")
  fi
}

# Becomes the launcher's supervisor: $@ is the launch command.
supervise() {
  [ "$1" = torchrun ] || [ "$MAX_RESTARTS" = 0 ] || refuse "MAX_RESTARTS: $1 cannot restart a job; 02 and 04 can"
  exec python3 "$root/common/supervise.py" "$@"
}
