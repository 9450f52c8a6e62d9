# SPDX-License-Identifier: Apache-2.0
"""How one argument's text becomes a value: the `type=` functions of arguments.py.

Each raises argparse.ArgumentTypeError with the text it was given and what is allowed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def one_of(allowed: Sequence[str]) -> Callable[[str], str]:
    """One of `allowed`, as it is."""

    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; allowed values: {', '.join(allowed)}"
            )
        return text

    return check


def whole(low: int) -> Callable[[str], int]:
    """A whole number, `low` or more."""

    def check(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; allowed values: whole numbers from {low} up"
            )
        return int(text)

    return check


def number(low: float, high: float, low_allowed: bool) -> Callable[[str], float]:
    """A number up to `high`, above `low` or, if `low_allowed`, from it."""
    rule = f"numbers {'from' if low_allowed else 'above'} {low:g} up to {high:g}"

    def check(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low < value <= high or (low_allowed and value == low)):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; allowed values: {rule}"
            )
        return value

    return check


def rates(text: str) -> tuple[float, ...]:
    """Shares by draft position, such as 0.8,0.6: from 0 to 1, never rising."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (2.0,)
    falling = all(a >= b for a, b in itertools.pairwise(rates))
    if not falling or not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed values: one number from 0 to 1 for each "
            "draft position, separated by commas, none above the one before it"
        )
    return rates


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed values: a JSON object such as "
            "'{\"num_hidden_layers\": 4}'"
        )
    return value


def file_to_write(suffix: str) -> Callable[[str], Path]:
    """The path of a file with this suffix, which need not exist."""

    def check(text: str) -> Path:
        path = Path(text)
        if path.suffix != suffix or path.is_dir():
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; allowed values: a file name that ends in "
                f"{suffix}"
            )
        return path

    return check
