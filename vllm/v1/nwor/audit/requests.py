# SPDX-License-Identifier: Apache-2.0
"""The requests that a runner knows, and their seats.

A request in the batch has a *seat*, where its text's identity is kept; a row of the
batch names its seat. A seat is given when a request comes into the batch, and its
text is then read from the host; from there on it is chained on the device.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

# Names of requests that findings may still ask for.
MAX_NAMES = 1 << 16
# Generations are int32 on the device; behind the last one comes 1 again.
MAX_GENERATION = (1 << 31) - 1


class Loads(enum.IntEnum):
    """Whether a KV connector fills blocks: not at all; where that is known (from its
    adapter, or from the scheduler: all that was not found in the cache); or anywhere in
    what a request is said to have found."""

    NONE = 0
    KNOWN = 1
    UNKNOWN = 2


@dataclass
class Request:
    """A request that the runner knows.

    num_found: tokens that were computed when it came. loads: whether a KV connector may
    have brought some of them. seed: stands for what its keys and values depend on
    besides its tokens, or what is to keep them from others; 0: nothing. is_opaque: they
    depend on more (embeddings, images): its identity is not looked at. seat: None until
    it is in a batch, and while another has it. was_seated: its text is chained on the
    device.
    """

    generation: int
    num_found: int
    loads: Loads
    seed: int
    is_opaque: bool
    seat: int | None = None
    was_seated: bool = False


def seed_of(new: Any, salt: str | None) -> int:
    """new: vLLM's NewRequestData."""
    lora = getattr(new, "lora_request", None)
    # As vLLM's prefix cache keeps texts of the same tokens apart.
    other = (lora.lora_name if lora is not None else None, salt or None)
    return zlib.crc32(repr(other).encode()) + 1 if any(other) else 0


class Requests(dict[str, Request]):
    """By their names. is_changed: since it was set to False, somebody came, or left a
    seat."""

    def __init__(self, num_seats: int) -> None:
        super().__init__()
        self.is_changed = True
        self._names: dict[int, str] = {}
        self._generations = itertools.count()
        # Numbers that a runner gives come back here, too, and are given to nobody.
        self._free_seats = set(range(num_seats))

    def name_of(self, generation: int) -> str | None:
        return self._names.get(generation)

    def add(self, name: str, *about: Any) -> Request:
        """In the place of one of the same name. about: a Request's, from num_found
        on."""
        self.forget(name)
        generation = next(self._generations) % MAX_GENERATION + 1
        request = self[name] = Request(generation, *about)
        self._names[generation] = name
        self._names.pop(generation - MAX_NAMES, None)
        self.is_changed = True
        return request

    def forget(self, *names: str) -> None:
        self.stand_up(*names)
        for name in names:
            self.pop(name, None)

    def stand_up(self, *names: str) -> None:
        """Requests that are not in the batch any more, if they are known."""
        for name in self.keys() & names:
            self.is_changed = True
            if (seat := self[name].seat) is not None:
                self._free_seats.add(seat)
                self[name].seat = None

    def free_seat(self, row_ids: Collection[str]) -> int:
        """If there is none, that of a request that is not among these; it waits for
        more input perhaps."""
        if not self._free_seats:
            others = self.keys() - set(row_ids)
            self.stand_up(next(n for n in others if self[n].seat is not None))
        return self._free_seats.pop()
