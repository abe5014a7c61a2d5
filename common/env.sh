# Sourced by the run.sh files and run_all.sh: which Python, how many processes, how many threads each.

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
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true # -1, and all after it, is none
  else
    (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU ' || true
  fi
}

# One process per GPU; without a GPU two, so that there is something to see.
GPUS=$(count_gpus)
if [ -z "${NPROC:-}" ]; then
  if [ "$GPUS" -gt 0 ]; then NPROC=$GPUS; else NPROC=2; fi
fi

# Sets the threads of each of $1 processes: an equal share of the cores. Left alone, each process would start a thread
# per core and they would fight (torchrun's own answer, one thread each, leaves cores idle when there are few processes).
share_cores() {
  local threads=$(($(nproc) / $1))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}
