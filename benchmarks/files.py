# SPDX-License-Identifier: Apache-2.0
"""Writing result files whole or not at all.

A file is written beside its target under a temporary name and then renamed over it, so
that a reader, and a run that is interrupted, finds the old file or the new one. Result
files are committed: of an absolute path they get the last part alone.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# The folders of an absolute path, in any text. In front of it stands nothing that would
# make it a part of something else: a relative path, a URL, a fraction.
_FOLDERS = re.compile(r"(?<![\w.~*:)\]}>/-])/(?:[\w.+@~-]+/)+")


def without_folders(content: Any) -> Any:
    """`content`, of what JSON has, with each absolute path in its texts cut down to its
    last part: they would tell of the machine."""
    if isinstance(content, str):
        return _FOLDERS.sub("", content)
    if isinstance(content, Mapping):
        return {without_folders(k): without_folders(v) for k, v in content.items()}
    if isinstance(content, list | tuple):
        return [without_folders(one) for one in content]
    return content


def write_whole(path: Path, fill: Callable[[Path], None]) -> None:
    """Makes `path` hold what `fill` writes to the path it is given, or leaves it as it
    was if anything raises. Creates the parent directory.

    fill: gets a temporary path in the same directory, with the suffix of `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(
        prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent
    )
    os.close(handle)
    temporary = Path(name)
    try:
        fill(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path` as JSON, whole or not at all, without_folders."""
    text = json_text(without_folders(content))
    write_whole(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def json_text(content: Any) -> str:
    """JSON with an item a line, but lists of plain values on one line."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    flat = re.compile(r"\[\s+([^\[\]{}\"]+?)\s+\]")
    return flat.sub(lambda m: "[" + re.sub(r"\s+", " ", m.group(1)) + "]", text) + "\n"
