# SPDX-License-Identifier: Apache-2.0
"""Writing result files whole or not at all.

A file is written beside its target under a temporary name and then renamed over it, so
that a reader, and a run that is interrupted, finds the old file or the new one. Result
files are committed and read by people: of an absolute path they get the last part
alone, floats are rounded, and what fits into a line is one.
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
# Characters of a line.
LINE_LENGTH = 1000
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
    """JSON in which a line holds what fits there, or plain values however many: an
    entry, or all samples of an arm."""
    line = json.dumps(content, allow_nan=False, ensure_ascii=False)
    is_object = isinstance(content, Mapping)
    values = content.values() if is_object else content
    if len(line) <= LINE_LENGTH or not any(
        isinstance(value, Mapping | list | tuple) for value in values
    ):
        return line
    inner = indent + " "
    texts = [json_text(value, inner) for value in values]
    if is_object:
        keys = (json.dumps(key, ensure_ascii=False) for key in content)
        texts = list(map(": ".join, zip(keys, texts, strict=True)))
    body = ",\n".join(inner + text for text in texts)
    return f"{line[0]}\n{body}\n{indent}{line[-1]}"
