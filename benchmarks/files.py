# SPDX-License-Identifier: Apache-2.0
"""Writing files whole or not at all, and what a committed result may hold.

A file is written next to its target under a temporary name and then renamed over it: a
reader, and a run that is interrupted, finds the old file or the new one. Results are
committed: only the last part of an absolute path is kept, and floats are rounded.
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
    """`content`, of JSON's types, as a result holds it: fractions rounded, and each
    absolute path in its texts cut to its last part, because folders are the machine's.
    Applying it twice changes nothing more."""
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
    the parent directory; keeps the mode of an existing file."""
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
    text = json.dumps(recorded(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, f"{text}\n".encode())
