#!/usr/bin/env bash
# Sets up what is missing, then
#
#     bash run_all.sh [options of main.py]     trains with the five methods one after another, and compares them
#     bash run_all.sh --test [options of pytest]     runs the tests
#     bash run_all.sh --bench [--rounds 50] [options of main.py]     measures their speed beside a bare loop's
#     bash run_all.sh --timeline [--slow-rank R] [options of main.py]     draws what each process does, and when
#
# Results go to runs/, or where RUNS says.
# Set-up goes into the active virtual or conda environment, else into .venv, which it makes. System packages are yours to
# install: where one is missing, it says which.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
  echo "run_all.sh: $1" >&2
  exit 2
}

command -v python3 >/dev/null || fail "python3 is missing. Debian and Ubuntu: apt-get install python3 python3-venv"
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ ! -x "$root/.venv/bin/pip" ]; then
  echo "Making a virtual environment in $root/.venv ..."
  rm -rf "$root/.venv"
  python3 -m venv "$root/.venv" >/dev/null || {
    rm -rf "$root/.venv"
    fail "python3 cannot make a virtual environment. Debian and Ubuntu: apt-get install python3-venv"
  }
fi
source "$root/common/env.sh"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$(python3 --version) is too old: needs 3.10 or newer"

# Prints what is missing or too old. Looks at the packages' metadata only: importing torch alone would take seconds.
missing() {
  python3 - "$root/requirements.txt" <<'PYTHON'
import pathlib, sys
from importlib.metadata import PackageNotFoundError, distribution, version

try:
    from packaging.requirements import Requirement

    for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
        wanted = Requirement(line.partition("#")[0].strip())
        if version(wanted.name) not in wanted.specifier:
            raise PackageNotFoundError(wanted.name)
except (ImportError, PackageNotFoundError):
    print("requirements")
try:
    built_for = pathlib.Path(distribution("horovod").locate_file("horovod/built-for"))  # install.sh writes it
    if built_for.is_file() and built_for.read_text().strip() != f"torch {version('torch')}":
        print("horovod")
except PackageNotFoundError:
    print("horovod")
PYTHON
}

todo=$(missing)
if grep -q requirements <<<"$todo"; then
  echo "Installing requirements.txt into $(python3 -c 'import sys; print(sys.prefix)') ..."
  python3 -m pip install -r "$root/requirements.txt" || fail "could not install requirements.txt (see above)"
  todo=$(missing)
fi
horovod=
if grep -q horovod <<<"$todo"; then
  horovod=$(bash "$root/05_horovod/install.sh" 2>&1 | tee >(cat >&2) | tail -n 1) && horovod=
fi

if [ "${1:-}" = --test ]; then
  exec python3 -m pytest "$root/tests" "${@:2}"
fi

case "${1:-}" in --bench | --timeline)
  exec python3 "$root/common/${1#--}.py" "${RUNS:-$root/runs}" "${@:2}" ;;
esac

# A method that fails does not stop the others: the comparison says what became of it.
runs=${RUNS:-$root/runs}
mkdir -p "$runs"
outcomes=() child=
trap '[ -z "$child" ] || kill "$child"; wait; exit 130' INT TERM HUP
for method in 01_dataparallel 02_distributed 03_multiprocessing 04_apex 05_horovod; do
  if [ "$method" = 05_horovod ] && [ -n "$horovod" ]; then
    outcomes+=("$method=no Horovod: ${horovod#install.sh: }")
    continue
  fi
  printf '\n== %s\n' "$method"
  # In the background, so that bash passes a SIGTERM on at once and not when the method is done.
  bash "$root/$method/run.sh" "$@" --output "$runs/$method" &
  child=$!
  if wait "$child"; then
    outcomes+=("$method=")
  else
    outcomes+=("$method=ended with status $?")
  fi
done
echo
python3 "$root/common/report.py" "$runs" "${outcomes[@]}"
