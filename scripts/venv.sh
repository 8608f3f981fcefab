#!/usr/bin/env bash
# Makes the Python environment that tests compare against: the full PyTorch
# (4.7 GB). Repeating it costs nothing.
#
#   VENV  where to (default .venv)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
wanted="torch==2.11.0 numpy safetensors==0.8.0"

complete() {
    "$venv/bin/python" - 2>/dev/null <<'PYTHON'
from importlib.metadata import version
import sys
sys.exit(
    version("torch") != "2.11.0" or not version("numpy") or version("safetensors") != "0.8.0"
)
PYTHON
}

if complete; then
    exit 0
fi
echo "venv: installing $wanted into $venv (4.7 GB)"
if ! [ -x "$venv/bin/pip" ]; then
    python3 -m venv "$venv" || {
        echo "venv: python3 cannot make environments (Debian: apt install python3-venv)" >&2
        exit 1
    }
fi
# shellcheck disable=SC2086 # two requirements
"$venv/bin/pip" install --quiet $wanted
complete
