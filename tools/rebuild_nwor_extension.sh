#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Brings the checkout's native library up to date in place, compiling only what changed,
# and checks in a fresh process that all ops are registered. For a change of kernels;
# Python files are live without it.
#
#   tools/rebuild_nwor_extension.sh [--cuda auto|on|off] [--archs LIST]
#
# PYTHON names the Python that has torch (default: .venv's if there is one, else
# python3). Exit status: 0 done, 1 the build or the check failed, 2 a bad argument.
set -euo pipefail
cd "$(dirname "$0")/.."

for python in "${PYTHON:-.venv/bin/python}" "${PYTHON:-python3}"; do
    if command -v "$python" >/dev/null; then
        exec "$python" tools/native.py --check "$@"
    fi
done
echo "rebuild: PYTHON is '$python', which is not there" >&2
exit 1
