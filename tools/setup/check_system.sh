#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks what this project needs of the system and cannot install with pip: prints one
# line per missing thing, with the command that installs it, and exits 1 if any is.
# With --install it runs those commands (Debian and Ubuntu, as root or with sudo).
#
# Needs nothing but a POSIX shell. PYTHON names the interpreter (default: python3).
set -u

PYTHON=${PYTHON:-python3}
SUDO=
[ "$(id -u 2>/dev/null || echo 0)" = 0 ] || SUDO="sudo "

# Prints "package|what is missing and why" for each missing thing.
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
    print("python3-dev|Python.h (torch compiles some CPU kernels at run time)")
try:
    ctypes.CDLL("libnuma.so.1")
except OSError:
    print("libnuma1|libnuma.so.1 (vLLM's CPU library is linked to it)")
EOF
}

report() {
    echo "$1" | while IFS='|' read -r package what; do
        echo "missing: $what. Install it with: ${SUDO}apt-get install -y $package" >&2
    done
}

missing=$(find_missing)
[ -n "$missing" ] || exit 0
if [ "${1:-}" != --install ]; then
    report "$missing"
    echo "\`make deps\` installs what is missing." >&2
    exit 1
fi

if ! command -v apt-get >/dev/null 2>&1; then
    report "$missing"
    echo "apt-get is not here: install these with this system's package manager." >&2
    exit 1
fi
# shellcheck disable=SC2086 # "sudo ", a word of its own
${SUDO}apt-get update -q || exit 1
# A second round: with a new Python more can be looked at.
for _ in 1 2; do
    packages=$(echo "$missing" | cut -d'|' -f1)
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive ${SUDO}apt-get install -y -q \
        --no-install-recommends $packages || exit 1
    missing=$(find_missing)
    [ -n "$missing" ] || exit 0
done
report "$missing"
exit 1
