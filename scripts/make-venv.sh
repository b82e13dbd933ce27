#!/bin/sh
# make-venv.sh PYTHON VENV: creates a virtual environment with pip, also on a machine with nothing but python3.
set -eu
python=$1 venv=$2
"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Hodei needs Python 3.11 or newer; this is {sys.version.split()[0]}. Try: make PYTHON=python3.12 ...")
PY
[ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && exit 0
echo "==> creating a virtual environment in $venv ($("$python" --version))"
rm -rf "$venv"
if "$python" -m venv "$venv" >/dev/null 2>&1; then exit 0; fi
# Debian packages venv and ensurepip separately from python3.
rm -rf "$venv"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing python3-venv (a separate package on Debian)" >&2
    version=$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
    { apt-get install -y -qq "python$version-venv" || { apt-get update -qq && apt-get install -y -qq "python$version-venv"; } ||
        apt-get install -y -qq python3-venv; } >/dev/null 2>&1 || true
    "$python" -m venv "$venv" && exit 0
fi
rm -rf "$venv"
if "$python" -m virtualenv -q "$venv" 2>/dev/null; then exit 0; fi
echo "cannot create a virtual environment: python's venv module is missing" >&2
echo "next: sudo apt-get install python3-venv   (or: $python -m pip install --user virtualenv)" >&2
exit 1
