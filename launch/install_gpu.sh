#!/usr/bin/env bash
# Installs what a machine with NVIDIA GPUs has more than others, into the environment of `make install`, and says what each
# part brings. Nothing of it is needed: without it everything runs, slower.
#
#   launch/install_gpu.sh [--with-apex] [--without-transformer-engine] [--dry-run]
#
# Both parts are compiled here, and Apex only on request: CUDA's compiler (nvcc) must have the major version of torch's CUDA, and 10 to 30 minutes and a
# few GB per job are needed; MAX_JOBS bounds the jobs. PYTHON chooses another interpreter.
set -euo pipefail
script=launch/install_gpu.sh
source "$(dirname "$0")/common.sh"

apex= engine=1 run=
for word in "$@"; do
  case $word in
    --with-apex) apex=1 ;;
    --without-transformer-engine) engine= ;;
    --dry-run) run=echo ;;
    *) usage ;;
  esac
done

here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
[ -x "$python" ] || fail "no Python at $python: run make install first, or set PYTHON"
cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
[ -n "$cuda" ] || fail "this torch was built without CUDA: install a CUDA build of the same version first, e.g." \
  "$python -m pip install torch==$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')" \
  "--index-url https://download.pytorch.org/whl/cu126"
command -v nvcc >/dev/null || fail "no nvcc on PATH: install the CUDA toolkit $cuda, or load your cluster's module"
compiler=$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
[ "${compiler%%.*}" = "${cuda%%.*}" ] || fail "nvcc is CUDA $compiler, torch was built for $cuda: the major versions must agree"
export MAX_JOBS=${MAX_JOBS:-4}
install=("$python" -m pip install --no-build-isolation)

$run "${install[@]}" ninja packaging wheel setuptools
if [ -n "$engine" ]; then
  echo "Transformer Engine: fused layers (norm with projection, rotary embedding) and cuDNN attention. Used by itself, where found."
  $run "${install[@]}" 'transformer_engine[pytorch]'
fi
if [ -n "$apex" ]; then
  # NVIDIA's, from its source. The package called apex on PyPI is something else, and breaks megatron-core.
  echo "NVIDIA Apex: the multi-tensor kernels of megatron-core's own optimizer and its fused LayerNorm. This project uses" \
    "neither; it ends megatron-core's warnings that it fell back to others, and serves your own megatron-core code."
  APEX_CPP_EXT=1 APEX_CUDA_EXT=1 $run "${install[@]}" -v git+https://github.com/NVIDIA/apex.git
fi
$run "$python" -c 'import megatron.core; print("megatron-core still imports")'
