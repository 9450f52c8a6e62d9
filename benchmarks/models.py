# SPDX-License-Identifier: Apache-2.0
"""Which models a bench runs: the converted SmolLM2, a named shape, or the user's own.

`shape:NAME` is a configuration without weights: vLLM fills it with random ones
(`load_format="dummy"`), which is enough to time an engine of that shape. The files are
made in the cache folder; they hold no weights and no tokenizer. In shapes.json,
llama-8b and llama-1b have the sizes that Meta published for Llama 3.1 8B and Llama 3.2
1B; llama-8b-eagle is one layer of the first, as an EAGLE head is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import BadArgument
from benchmarks.files import write_json
from tools.setup.make_models import cache_dir

SHAPE = "shape:"
# Names that tools/setup/make_models.py gives to what it converts.
TARGET = "smollm2-135m"
DRAFTER = "smollm2-draft-26"
SHAPES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("shapes.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Model:
    """A model that vLLM can be given.

    location: directory or Hugging Face name. label: what reports call it.
    random_weights: True if it has no weights of its own, and no tokenizer.
    """

    location: str
    label: str
    random_weights: bool


def find(argument: str, value: str | None, default: str) -> Model:
    """The model that `value` names; None names `default` in the cache folder.

    argument: the option's name, for the message. Raises BadArgument: no such shape or
    directory, or the default was not made yet.
    """
    name = (value or "").removeprefix(SHAPE)
    if name != value and name in SHAPES:
        directory = cache_dir() / "shapes" / name
        write_json(directory / "config.json", SHAPES[name])
        return Model(str(directory), f"{value}", random_weights=True)
    made = cache_dir() / "models" / default
    path = made if value is None else Path(value).expanduser()
    if (path / "config.json").is_file():
        return Model(str(path), path.resolve().name, random_weights=False)
    if value is None:
        raise BadArgument(
            f"argument {argument}: the default model {default} is not in the cache "
            f"folder; make it with `python tools/setup/make_models.py --only {default}`"
            ", or name another model"
        )
    looks_like_path = value.startswith((".", "/", "~")) or value.count("/") != 1
    if looks_like_path or path.exists():
        raise BadArgument(
            f"argument {argument}: '{value}' holds no config.json; allowed values: a "
            "model's directory, a Hugging Face name (owner/name), or one of "
            + ", ".join(SHAPE + name for name in SHAPES)
        )
    return Model(value, value, random_weights=False)
