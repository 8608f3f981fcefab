#!/usr/bin/env bash
# Makes the Python environment of the S3 server that tests start. Repeating it
# costs nothing.
#
#   S3_VENV  where to (default .venv-s3)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${S3_VENV:-.venv-s3}
if [ -x "$venv/bin/moto_server" ]; then
    exit 0
fi
echo "s3: installing moto into $venv"
python3 -m venv "$venv" || {
    echo "s3: python3 cannot make environments (Debian: apt install python3-venv)" >&2
    exit 1
}
"$venv/bin/pip" install --quiet 'moto[s3,server]==5.*'
