#!/usr/bin/env bash
# Builds Horovod 0.28.1, its last release, from its PyPI source for the PyTorch that is installed (about 3 minutes).
#
#     bash 05_horovod/install.sh                               # over NCCL where there is a GPU and nvcc, else CPU over gloo
#     HOROVOD_GPU_OPERATIONS=NCCL bash 05_horovod/install.sh   # over NCCL also where no GPU is in sight (a login node)
set -euo pipefail
version=0.28.1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/env.sh"

fail() {
  echo "install.sh: $1" >&2
  exit 2
}

python3 -c 'import torch' 2>/dev/null || fail "PyTorch is not installed in $(command -v python3): run 'bash run_all.sh' first"
torch_version=$(python3 -c 'from importlib.metadata import version; print(version("torch"))')
site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')

gpu=${HOROVOD_GPU_OPERATIONS:-}
if [ -z "$gpu" ] && [ "$GPUS" -gt 0 ]; then
  if command -v nvcc >/dev/null; then gpu=NCCL; else echo "No nvcc, so no GPUs for Horovod: install the CUDA toolkit for them"; fi
fi

# A Horovod that works is left as it is. `built-for`, written at the end, tells whether it was made for this very PyTorch.
built_for=$(cat "$site/horovod/built-for" 2>/dev/null || echo "torch $torch_version")
if [ "$built_for" = "torch $torch_version" ] && check=$(python3 -m horovod.runner.launch --check-build 2>/dev/null) &&
  python3 -c 'import horovod.torch' 2>/dev/null && { [ -z "$gpu" ] || grep -q "\[X\] $gpu" <<<"$check"; }; then
  echo "Horovod is installed already, for torch $torch_version"
  exit 0
fi

command -v g++ >/dev/null || fail "a C++ compiler is missing. Debian and Ubuntu: apt-get install g++"
command -v cmake >/dev/null || fail "CMake is missing. Debian and Ubuntu: apt-get install cmake; everywhere: pip install cmake"
command -v make >/dev/null || fail "make is missing. Debian and Ubuntu: apt-get install make"
[ -f "$headers/Python.h" ] || fail "Python's headers ($headers/Python.h) are missing. Debian and Ubuntu: apt-get install python3-dev"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/build.log

# The build imports the installed torch, so it cannot be isolated from it, and what an isolated build would bring along
# has to be here: setuptools (from 81 on it lacks pkg_resources, which Horovod's setup.py imports), wheel, packaging.
python3 -m pip install --quiet 'setuptools<81' wheel packaging
python3 -m pip download --quiet --no-deps --no-binary horovod --no-build-isolation --dest "$work" "horovod==$version"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
source=$work/horovod-$version

# edit FILE OLD NEW: replaces OLD in every line; a Horovod in which there is nothing to replace is not the one we know.
edit() {
  grep -qF -- "$2" "$source/$1" || fail "cannot find '$2' in Horovod's $1"
  python3 - "$source/$1" "$2" "$3" <<'PYTHON'
import pathlib, sys
path, old, new = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
path.write_text(path.read_text().replace(old, new))
PYTHON
}

# PyTorch's headers need C++17 since 2.1 and C++20 today; Horovod asks for C++14.
edit CMakeLists.txt 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 20)'
edit horovod/torch/CMakeLists.txt 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 20)'
# Over gloo, Horovod's list of ranks stays empty, and so it never finds the rank that all others wait for (--timeout).
edit horovod/common/gloo/gloo_controller.cc 'global_ranks_.reserve(size_)' 'global_ranks_.resize(size_)'

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1    # gloo needs nothing installed; MPI would
export CMAKE_POLICY_VERSION_MINIMUM=3.5             # CMake 4 refuses the CMake files of the gloo that Horovod brings along
export CXXFLAGS="${CXXFLAGS:-} -include cstdint"    # since gcc 13, <string> no longer brings std::uint32_t with it
export MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
if [ -n "$gpu" ]; then
  # CUDA 13 compiles C++17 and later only; Horovod asks for C++11.
  edit horovod/common/ops/cuda/CMakeLists.txt 'set(CMAKE_CUDA_STANDARD 11)' 'set(CMAKE_CUDA_STANDARD 17)'
  # The NCCL that PyTorch itself uses. Its package has libnccl.so.2 only, the linker looks for libnccl.so.
  nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])') || fail "PyTorch's NCCL package is missing"
  cp -r "$nccl" "$work/nccl"
  ln -sf libnccl.so.2 "$work/nccl/lib/libnccl.so"
  # Horovod and PyTorch look for CUDA beside the nvcc on PATH, which may be a link or a wrapper that lives elsewhere.
  if [ -z "${CUDA_HOME:-}" ] && [ -d /usr/local/cuda ]; then export CUDA_HOME=/usr/local/cuda; fi
  export CUDACXX=${CUDACXX:-${CUDA_HOME:+$CUDA_HOME/bin/nvcc}}
  export HOROVOD_GPU_OPERATIONS=$gpu HOROVOD_NCCL_HOME=$work/nccl HOROVOD_NCCL_LINK=SHARED
else
  # A CUDA build of PyTorch beside an nvcc makes Horovod include CUDA's headers also in a CPU build, which then fails.
  edit cmake/Modules/FindPytorch.cmake '(torch.version.cuda is not None) and (CUDA_HOME is not None)' 'False'
  unset HOROVOD_GPU_OPERATIONS
fi

echo "Building Horovod $version for torch $torch_version, ${gpu:-CPU}: about 3 minutes on two cores ..."
if ! python3 -m pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps "$source" >"$log" 2>&1; then
  grep -E -A 4 -m 3 '(CMake Error|error:)' "$log" >&2 || tail -n 15 "$log" >&2
  fail "Horovod did not build for PyTorch $torch_version (what its log says is above)"
fi
python3 -m pip install --quiet cloudpickle psutil pyyaml 'cffi>=1.4.0'    # what Horovod imports; --no-deps kept torch as it is

# Does it work, and is it what was asked for?
check=$(python3 -m horovod.runner.launch --check-build)
echo "$check"
if ! grep -q '\[X\] PyTorch' <<<"$check" || ! grep -q "\[X\] ${gpu:-Gloo}" <<<"$check" || ! python3 -c 'import horovod.torch'; then
  python3 -m pip uninstall --quiet --yes horovod
  fail "Horovod was built, but without PyTorch or ${gpu:-Gloo}, or it cannot be imported (see above): removed again"
fi
echo "torch $torch_version" >"$site/horovod/built-for"
echo "Horovod $version is installed, built for torch $torch_version, ${gpu:-CPU}"
