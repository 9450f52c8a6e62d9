#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Brings the checkout's native library up to date in place, compiling only what changed,
# and checks in a fresh process that all ops are registered. For a change of kernels;
# Python files are live without it.
#
#   tools/rebuild_nwor_extension.sh [--cuda auto|on|off] [--archs LIST]
#
#   --cuda     with CUDA code; auto (the default): if nvcc is on PATH
#   --archs    compute capabilities, e.g. "90" or "80;90" (default: of CMakeLists.txt)
#
# PYTHON names the Python that has torch (default: .venv's if there is one, else
# python3). Exit status: 0 done, 1 the build or the check failed, 2 a bad argument.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
LIBRARY=vllm/v1/nwor/_nwor_C.so

refuse() {
    echo "rebuild: $*" >&2
    exit 2
}

cuda=${NWOR_CUDA:-auto}
archs=${NWOR_CUDA_ARCHS:-}
while [ $# -gt 0 ]; do
    case $1 in
    --cuda | --archs)
        [ $# -gt 1 ] || refuse "$1 needs a value"
        if [ "$1" = --cuda ]; then cuda=$2; else archs=$2; fi
        shift 2
        ;;
    -h | --help)
        sed -n '3,13s/^# \{0,1\}//p' "$0"
        exit
        ;;
    *) refuse "unknown argument '$1'; allowed are --cuda, --archs and --help" ;;
    esac
done
case ${cuda,,} in
auto) if command -v nvcc >/dev/null; then cuda=ON; else cuda=OFF; fi ;;
on | off) cuda=${cuda^^} ;;
*) refuse "--cuda is '$cuda'; allowed are auto, on and off" ;;
esac
[[ $archs =~ ^([0-9]+[af]?(;[0-9]+[af]?)*)?$ ]] ||
    refuse "--archs is '$archs'; must be a list such as \"90\" or \"80;90\""
if [ "$cuda" = ON ]; then device=cuda; else device=cpu; fi

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x "$ROOT/.venv/bin/python" ]; then PYTHON=$ROOT/.venv/bin/python; fi
fi
command -v "$PYTHON" >/dev/null || {
    echo "rebuild: PYTHON is '$PYTHON', which is not there" >&2
    exit 1
}

NWOR_CUDA=$cuda NWOR_CUDA_ARCHS=$archs "$PYTHON" "$ROOT/tools/native.py"
cd "$ROOT"
PYTHONPATH=vllm/v1 "$PYTHON" -c '
import sys
from nwor.doctor import library
for is_fine, _, said in library(sys.argv[1]):
    print("check:", said)
    sys.exit(not is_fine and f"rebuild: the library is of no use: {said}")' $device
echo "rebuild: $LIBRARY is up to date (CUDA $cuda), $SECONDS s"
