#!/usr/bin/env bash
# Trains with torch.distributed under Slurm. Edit the head; then, in the repository's folder, which all nodes must share:
#
#     sbatch 02_distributed/slurm.sh [options of main.py]
#
# A job that comes to its time limit, or that Slurm takes off its nodes, is queued again and goes on from its last finished
# epoch; so give each job an --output of its own, in a folder that all nodes share. After a failure it is queued again as
# often as MAX_RESTARTS says, time limits counted too (MAX_RESTARTS=3 sbatch ...); before that torchrun restarts its processes.
#SBATCH --job-name=distributed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#
# To use one of these, remove its first #:
##SBATCH --gpus-per-node=4
##SBATCH --cpus-per-task=32
##SBATCH --partition=gpu
#
# These make it go on by itself:
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
#SBATCH --open-mode=append
set -euo pipefail
root=${SLURM_SUBMIT_DIR:?is not set: submit this with sbatch}
source "$root/common/env.sh" # NPROC: the node's GPUs; MAX_RESTARTS
share_cores "$NPROC"
go_on "$@"
[ "$(nproc)" -ge "$NPROC" ] || echo "note: $(nproc) cores for $NPROC processes: --cpus-per-task, in the head" >&2
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it over itself

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # another one for each job

# A minute before the time limit. Requeueing ends the job's processes.
requeued=
trap 'requeued=1; echo "out of time: requeueing job $SLURM_JOB_ID"; scontrol requeue "$SLURM_JOB_ID"' USR1

# In the background, so that bash answers the signal while it waits.
srun --kill-on-bad-exit=1 python3 "$root/common/supervise.py" \
  torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="$NPROC" --max-restarts="$MAX_RESTARTS" \
  --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv_id="$SLURM_JOB_ID" --rdzv_conf=read_timeout=600 \
  "$root/02_distributed/main.py" "${RESUME[@]}" "$@" &
status=0
wait "$!" || status=$?
if [ -n "$requeued" ]; then
  wait "$!" || exit
fi

# A failure, other than wrong input (2). Slurm requeues a job whose node it finds dead, but the job mostly finds out first.
if [ "$status" != 0 ] && [ "$status" != 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ]; then
  echo "status $status: requeueing job $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
