#!/usr/bin/env bash
# Makes the virtual environment in which the Python package is built: DIR/bin has python and maturin. DIR is
# the first argument, or target/python. Asks nothing; does nothing when all is there. What the tests need, they
# install beside the wheel, in an environment of their own.
set -euo pipefail
cd "$(dirname "$0")/.."

dir="${1:-${CARGO_TARGET_DIR:-target}/python}"
maturin='maturin>=1.9.4,<2'

if ! command -v python3 >/dev/null 2>&1; then
    echo "setup-python: python3 is missing; install Python 3.9 or newer" >&2
    exit 1
fi
"$dir/bin/maturin" --version >/dev/null 2>&1 && exit 0
if ! python3 -m venv "$dir"; then
    echo "setup-python: python3 can't make a virtual environment in $dir; install python3-venv" >&2
    exit 1
fi
if ! "$dir/bin/pip" install --quiet --disable-pip-version-check "$maturin"; then
    echo "setup-python: pip can't install $maturin; is PyPI, or a mirror of it, in reach?" >&2
    exit 1
fi
