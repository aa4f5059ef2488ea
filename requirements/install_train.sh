#!/usr/bin/env bash
# Installs what training needs into a virtual environment in which vLLM is already.
#
#   requirements/install_train.sh .venv
#
# vLLM's torch is the one to learn with, and what it compiles with stays at its version. Of the rest
# pip keeps whatever training can take as it is.
set -euo pipefail

venv=${1:?usage: install_train.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
python=$venv/bin/python

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Packages that were installed from a file or a folder cannot be constraints.
"$python" -m pip list --format=freeze --exclude-editable --disable-pip-version-check \
  | grep -E '^(llvmlite|numba|numpy|torch|vllm)==' > "$work/installed.txt"
"$python" -m pip install --quiet --disable-pip-version-check \
  --constraint "$work/installed.txt" -e "$here/..[train]"
