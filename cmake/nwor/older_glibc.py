# SPDX-License-Identifier: Apache-2.0
"""Writes libraries to link with, so that the result loads with an older glibc.

    python older_glibc.py COMPILER FOLDER

In glibc 2.34 the functions of libpthread, libdl and librt moved to libc, under a new
version; the old ones remain for programs that were linked before. A library that is
linked with the new ones needs 2.34 for no other reason. The libraries written to FOLDER
have the old libraries' names, and such functions with the versions that they had
there: the linker, which finds them first, notes those. They are not loaded by anyone.

Prints their paths, one a line; nothing if this glibc is older than 2.34, or another C
library.
"""

import re
import subprocess
import sys
from pathlib import Path

MOVED = (2, 34)
# Their old libraries.
FAMILIES = {
    "libpthread.so.0": re.compile("(pthread|sem)_"),
    "libdl.so.2": re.compile("dl"),
    "librt.so.1": re.compile("shm_"),
}


def versions(libc: str) -> dict[str, list[tuple[int, ...]]]:
    """Versions of each function that the library has."""
    command = ["readelf", "--wide", "--dyn-syms", libc]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, number in re.findall(r" FUNC .* (\w+)@+GLIBC_([\d.]+)$", text, re.M):
        found.setdefault(name, []).append(tuple(map(int, number.split("."))))
    return found


def write(compiler: str, library: Path, functions: dict[str, tuple[int, ...]]) -> None:
    """A library with these functions, each of that version."""
    by_version: dict[tuple[int, ...], list[str]] = {}
    for name, version in functions.items():
        by_version.setdefault(version, []).append(name)
    script = library.with_suffix(".map")
    script.write_text(
        "".join(
            f"GLIBC_{'.'.join(map(str, version))} {{ {'; '.join(names)}; }};\n"
            for version, names in sorted(by_version.items())
        )
    )
    source = library.with_suffix(".s")
    lines = (f".globl {n}\n.type {n}, %function\n{n}: .byte 0\n" for n in functions)
    source.write_text("".join(lines) + '.section .note.GNU-stack,"",%progbits\n')
    command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{library.name}"]
    command += [f"-Wl,--version-script={script}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)


def main() -> None:
    compiler, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-print-file-name=libc.so.6"]
    libc = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if not Path(libc.strip()).is_file():
        return
    found = versions(libc.strip())
    for name, family in FAMILIES.items():
        functions = {
            function: max(older)
            for function, of in found.items()
            if family.match(function) and MOVED in of
            for older in [[version for version in of if version < MOVED]]
            if older
        }
        if functions:
            write(compiler, folder / name, functions)
            print(folder / name)


if __name__ == "__main__":
    main()
