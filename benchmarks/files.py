# SPDX-License-Identifier: Apache-2.0
"""Writing result files whole or not at all.

A file is written beside its target under a temporary name and then renamed over it, so
that a reader, and a run that is interrupted, finds the old file or the new one. Result
files are committed and read by people: of an absolute path they get the last part
alone, floats are rounded, and a row of plain values is a line.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of a float, and of one in a list, which is a sample among others.
SIGNIFICANT_DIGITS, SAMPLE_DIGITS = 9, 6
# The folders of an absolute path, in any text. In front of it stands nothing that would
# make it a part of something else: a relative path, a URL, a fraction.
_FOLDERS = re.compile(r"(?<![\w.~*:)\]}>/-])/(?:[\w.+@~-]+/)+")


def recorded(content: Any, digits: int = SIGNIFICANT_DIGITS) -> Any:
    """`content`, of what JSON has, as a result file holds it: fractions rounded, and
    each absolute path in its texts cut down to its last part: folders are the
    machine's. What was recorded already stays as it is."""
    if isinstance(content, str):
        return _FOLDERS.sub("", content)
    if isinstance(content, float) and not content.is_integer():
        return float(f"{content:.{digits}g}")
    if isinstance(content, Mapping):
        return {recorded(k): recorded(v) for k, v in content.items()}
    if isinstance(content, list | tuple):
        return [recorded(one, SAMPLE_DIGITS) for one in content]
    return content


def write_whole(path: Path, content: bytes) -> None:
    """Makes `path` hold `content`, or leaves it as it was if anything raises. Creates
    the parent directory; a file that is there keeps its mode, and what it links to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path` as JSON, whole or not at all, as `recorded` has it."""
    write_whole(path, f"{json_text(recorded(content))}\n".encode())


def json_text(content: Any, indent: str = "") -> str:
    """JSON in which a line holds plain values, or lists and objects of them: all
    samples of an arm, say, are one line."""
    if _height(content) <= 2:
        return json.dumps(content, allow_nan=False, ensure_ascii=False)
    inner = indent + " "
    if isinstance(content, Mapping):
        items = [
            f"{json.dumps(key, ensure_ascii=False)}: {json_text(value, inner)}"
            for key, value in content.items()
        ]
        begin, end = "{", "}"
    else:
        items, (begin, end) = [json_text(one, inner) for one in content], "[]"
    body = ",\n".join(inner + item for item in items)
    return f"{begin}\n{body}\n{indent}{end}"


def _height(content: Any) -> int:
    """Lists and objects in each other: 0 of a plain value, 1 of a list of numbers."""
    if isinstance(content, Mapping):
        content = list(content.values())
    if not isinstance(content, list | tuple):
        return 0
    return 1 + max(map(_height, content), default=0)
