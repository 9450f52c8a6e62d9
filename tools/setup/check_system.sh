#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks the system's programs and libraries that pip cannot install: prints one line for
# each missing one, with the command that installs it, and exits 1 if there is any.
# With --install it installs them first (Debian and Ubuntu, as root or with sudo).
# PYTHON names the interpreter (default: python3).
set -u

PYTHON=${PYTHON:-python3}
SUDO=
[ "$(id -u 2>/dev/null || echo 0)" = 0 ] || SUDO="sudo "

# Prints "package|what is missing and why" for each.
find_missing() {
    command -v make >/dev/null 2>&1 || echo "make|make (runs every command here)"
    command -v g++ >/dev/null 2>&1 || echo "g++|g++ (compiles the native library)"
    if ! command -v "$PYTHON" >/dev/null 2>&1; then
        echo "python3|$PYTHON (Python 3.11 or later; PYTHON=... names another)"
        return
    fi
    "$PYTHON" - <<'EOF'
import ctypes
import importlib.util
import os
import sys
import sysconfig

found = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    print(f"python3|Python 3.11 or later ({sys.executable} is {found}; "
          "PYTHON=... names another)")
    sys.exit()
if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
    print(f"python3-venv|Python's venv module (for {sys.executable})")
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not os.path.isfile(header):
    print("python3-dev|Python.h (the native library is a Python module)")
try:
    ctypes.CDLL("libnuma.so.1")
except OSError:
    print("libnuma1|libnuma.so.1 (vLLM's CPU library is linked to it)")
EOF
}

missing=$(find_missing)
[ -n "$missing" ] || exit 0
if [ "${1:-}" = --install ] && command -v apt-get >/dev/null 2>&1; then
    # shellcheck disable=SC2086 # "sudo ", a word of its own
    ${SUDO}apt-get update -q && DEBIAN_FRONTEND=noninteractive ${SUDO}apt-get install \
        -y -q --no-install-recommends make g++ python3 python3-venv python3-dev libnuma1 &&
        exec "$0"
fi
echo "$missing" | while IFS='|' read -r package what; do
    echo "missing: $what. Install it with: ${SUDO}apt-get install -y $package" >&2
done
echo "\`make deps\` installs what is missing, where there is apt-get." >&2
exit 1
