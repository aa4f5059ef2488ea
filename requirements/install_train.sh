#!/usr/bin/env bash
# Installs what training needs into a virtual environment in which vLLM is already.
#
#   requirements/install_train.sh .venv
#
# Everything that is there stays at its version: vLLM pins many of the same packages, and its torch
# is the one to learn with.
set -euo pipefail

venv=${1:?usage: install_train.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
python=$venv/bin/python

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Packages that were installed from a file or a folder cannot be constraints.
"$python" -m pip list --format=freeze --exclude-editable --disable-pip-version-check \
  > "$work/installed.txt"
"$python" -m pip install --quiet --disable-pip-version-check \
  --constraint "$work/installed.txt" -e "$here/..[train]"
