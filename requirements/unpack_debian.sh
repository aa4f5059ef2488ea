#!/usr/bin/env bash
# Puts programs of Debian packages into a virtual environment without installing the packages: an
# installed one would start a service on this machine, and installing needs root.
#
#   requirements/unpack_debian.sh .venv PROGRAM[,PROGRAM...] PACKAGE...
#
# Programs that are there already are left alone. It fails where there is no apt, or no such package.
set -euo pipefail

venv=${1:?usage: unpack_debian.sh VENV PROGRAM[,PROGRAM...] PACKAGE...}
IFS=, read -ra programs <<<"${2:?which programs?}"
shift 2

missing=()
for program in "${programs[@]}"; do command -v "$program" >/dev/null || missing+=("$program"); done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ]; then apt-get update -qq >/dev/null 2>&1 || true; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
(cd "$work" && apt-get download -qq "$@" >/dev/null 2>&1)
place=$(cd "$venv" && pwd)/debian
for package in "$work"/*.deb; do dpkg -x "$package" "$place"; done
libraries=$(find "$place" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
for program in "${missing[@]}"; do
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec %s "$@"\n' \
    "'$libraries'" "'$place/usr/bin/$program'" > "$venv/bin/$program"
  chmod +x "$venv/bin/$program"
done
