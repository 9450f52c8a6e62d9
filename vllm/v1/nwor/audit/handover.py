# SPDX-License-Identifier: Apache-2.0
"""Digests that travel from a prefill instance to a decode instance, with vLLM's
kv_transfer_params, so that the second one can compare what it has loaded.

The device takes the digests (loads.py); the prefill instance sends sums of them, of
each prompt:

    rows      of each full block in front of the last token: over its layers
    columns   of each layer: over these blocks
    slots     of the block with the last token, which may not be full: over its layers

A block that differs shows in its row, and its layers in the columns. The last token is
computed by both instances, so it is never compared.

A client can write kv_transfer_params, so nothing in there is used without the signature
of an instance with the same secret: an HMAC. What it covers includes the request and
its text (tokens, salt, adapter, images): the digests of one prove nothing of another.
Where the two instances do not store keys and values in the same format, equal ones have
other digests: nothing is compared then, and nothing is found.
"""

from __future__ import annotations

import base64
import enum
import hmac
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from ..step import NewRequest
from .loads import FOUND, LOADED, TAIL, Array, Heads, Wrong, word_at
from .requests import Handover
from .tables import AuditedGroup

logger = logging.getLogger("vllm.v1.nwor")

# In kv_transfer_params: ours, and what vLLM's connectors understand of a request whose
# keys and values go elsewhere, or come from there.
KEY, GIVES, TAKES = "nwor", "do_remote_decode", "do_remote_prefill"
VERSION = b"nwor1"
MAC_BYTES, TEXT_BYTES = 32, 16
UINT64 = np.dtype("<u8")


class Result(enum.StrEnum):
    """What became of the digests of a request that decodes here."""

    VERIFIED = "verified"
    WRONG = "wrong"
    PARTIAL = "partial"
    MISSING = "missing"
    MALFORMED = "malformed"
    SIGNATURE = "signature"
    REQUEST = "request"
    FORMAT = "format"


class Part(msgspec.Struct, array_like=True):
    """Of a KV-cache group. rows: 0 for a block without a digest, which is in no
    column."""

    format: dict[str, str]
    rows: bytes
    columns: bytes
    slots: bytes


class Sent(msgspec.Struct, array_like=True):
    """Of a request. parts: of the audited groups."""

    request_id: str
    text: bytes
    parts: list[Part]


class Refused(ValueError):
    """Digests that cannot be used. result: why, in a word."""

    def __init__(self, result: Result, why: str) -> None:
        super().__init__(why)
        self.result = result


# --- sums -----------------------------------------------------------------------------


def row_sums(digests: Array) -> Array:
    """[n] of [n, num_layers]. Never 0, which stands for none."""
    sums = word_at(digests, np.arange(digests.shape[1])).sum(axis=1, dtype=np.uint64)
    return np.maximum(sums, np.uint64(1))


def column_sums(blocks: Array, digests: Array) -> Array:
    """[num_layers] of [n, num_layers]. blocks: [n], their numbers in the text."""
    return word_at(digests, blocks[:, None]).sum(axis=0, dtype=np.uint64)


# --- what travels ---------------------------------------------------------------------


def sealed(sent: Sent, secret: bytes) -> str:
    body = VERSION + msgspec.msgpack.encode(sent)
    return base64.b64encode(hmac.digest(secret, body, "sha256") + body).decode()


def opened(value: object, secret: bytes) -> Sent:
    """Raises Refused."""
    try:
        data = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except ValueError:  # binascii.Error is one
        data = b""
    mac, body = data[:MAC_BYTES], data[MAC_BYTES:]
    if not body:
        raise Refused(Result.MALFORMED, f"{KEY!r} is not what vllm-nwor sends")
    if not hmac.compare_digest(mac, hmac.digest(secret, body, "sha256")):
        raise Refused(
            Result.SIGNATURE,
            "their signature is not one of this secret: the prefill instance has "
            "another one, or somebody else wrote them",
        )
    if not body.startswith(VERSION):
        raise Refused(
            Result.FORMAT, "they are of another version of vllm-nwor: install the same"
        )
    return msgspec.msgpack.decode(body[len(VERSION) :], type=Sent)


def text_of(new: NewRequest, secret: bytes) -> bytes | None:
    """Of all that keys and values depend on, but for the weights; None if a part is not
    known."""
    if not new.prompt or new.features is None or new.has_embeddings:
        return None
    adapter = None if new.adapter is None else new.adapter.name
    others = repr((new.cache_salt or None, adapter, list(map(tuple, new.features))))
    digest = blake2b(others.encode(), digest_size=TEXT_BYTES, key=secret[:64])
    digest.update(np.array(new.prompt, "<i8").tobytes())
    return digest.digest()


def format_of(group: AuditedGroup, num_ranks: int) -> dict[str, str]:
    """What must be alike for equal keys and values to have equal digests."""
    layouts = {layer.name: layer for layer in group.layers}
    dtypes = {str(layer.kv_cache.dtype) for layer in group.layers}
    slots = blake2b(digest_size=8)
    for name in group.names:
        runs = layouts[name].layout.runs
        slots.update(repr((name, layouts[name].layout.slot_bytes)).encode())
        slots.update(b"" if runs is None else runs.numpy().tobytes())
    return {
        "KV-cache group": str(group.shape.group_id),
        "block size": str(group.shape.block_size),
        "data types": ", ".join(sorted(dtypes)),
        "layers": str(len(group.names)),
        "ranks": str(num_ranks),
        "bytes of a slot": str(sum(of.layout.slot_bytes for of in group.layers)),
        "names and packing": slots.hexdigest(),
    }


# --- the two sides --------------------------------------------------------------------


class Given:
    """Of a request that gives its blocks away: the digests of its prompt, of each group
    by its place."""

    def __init__(
        self,
        request_id: str,
        text: bytes,
        num_tokens: int,
        groups: Sequence[AuditedGroup],
    ) -> None:
        self._about, self._last = (request_id, text), num_tokens - 1
        self._sizes = [of.shape.block_size for of in groups]
        self._rows = [np.zeros(self._last // size, UINT64) for size in self._sizes]
        self._columns = [np.zeros(len(of.names), UINT64) for of in groups]
        self._slots: dict[int, Array] = {}

    def add(self, place: int, heads: Heads, sums: Array) -> None:
        """Blocks with a digest."""
        size, rows = self._sizes[place], self._rows[place]
        blocks = heads.position // size
        is_whole = (heads.kind != LOADED) | (heads.num_slots == size)
        is_row = (heads.kind != TAIL) & (blocks < len(rows)) & is_whole
        new = np.flatnonzero(is_row)
        new = new[rows[blocks[new]] == 0]
        digests = sums[new, : len(self._columns[place])]
        rows[blocks[new]] = row_sums(digests)
        self._columns[place] += column_sums(blocks[new], digests)
        for i in np.flatnonzero((heads.kind == TAIL) & (blocks == len(rows))):
            if heads.num_slots[i] > self._last % size:
                self._slots[place] = sums[i, : heads.num_slots[i]]

    def sent(self, formats: Sequence[dict[str, str]]) -> Sent | None:
        """None before the last token was computed."""
        if len(self._slots) < len(self._rows):
            return None
        slots = [self._slots[place] for place in range(len(self._rows))]
        sums = zip(self._rows, self._columns, slots, strict=True)
        parts = [
            Part(about, *(of.tobytes() for of in of_group))
            for about, of_group in zip(formats, sums, strict=True)
        ]
        return Sent(*self._about, parts)


class Taken:
    """Of a request that takes its blocks from elsewhere. results: of its blocks."""

    def __init__(self, sent: Sent, sizes: Sequence[int]) -> None:
        self._sent, self._sizes = sent, sizes
        self.results = Counter[Result]()

    def judge(self, place: int, heads: Heads, sums: Array) -> dict[int, Wrong | bool]:
        """Loaded blocks, as Digests.judge, by their numbers in the cache."""
        size, part = self._sizes[place], self._sent.parts[place]
        rows, columns, slots = (
            np.frombuffer(of, UINT64) for of in (part.rows, part.columns, part.slots)
        )
        blocks, is_known = heads.position // size, heads.is_known == 1
        is_loaded = heads.kind == LOADED
        found: dict[int, Wrong | bool] = dict.fromkeys(heads.block[is_loaded], False)
        is_row = (is_loaded & (heads.num_slots == size)) | (heads.kind == FOUND)
        mine = np.flatnonzero(is_row & is_known & (blocks < len(rows)))
        mine = mine[rows[blocks[mine]] != 0]
        here, digests = blocks[mine], sums[mine, : int(part.format["layers"])]
        of_rows = row_sums(digests)
        is_wrong = of_rows != rows[here]
        layer, num_layers = -1, 0
        # Columns are over all blocks, and say nothing where one computed here differs.
        is_whole = np.array_equal(np.unique(here), np.arange(len(rows)))
        if is_whole and is_loaded[mine][is_wrong].all():
            differs = column_sums(here, digests) != columns
            num_layers = int(np.count_nonzero(differs))
            layer = int(differs.argmax()) if num_layers else -1
        for row, i in enumerate(mine):
            if is_loaded[i]:
                values = int(rows[here[row]]), int(of_rows[row])
                wrong = Wrong("not_as_sent", layer, num_layers, *values)
                found[int(heads.block[i])] = wrong if is_wrong[row] else True
        is_tail = (heads.kind == TAIL) & is_known & (blocks == len(rows))
        for i in np.flatnonzero(is_tail & (heads.num_slots <= len(slots))):
            last = sums[i, : heads.num_slots[i]]
            differs = last != slots[: len(last)]
            o, block = int(differs.argmax()), int(heads.block[i])
            wrong = Wrong("not_as_sent", -1, 0, int(slots[o]), int(last[o]), 0, o)
            if block in found:
                found[block] = wrong if differs.any() else True
        for verdict in found.values():
            self.results[_RESULTS.get(verdict, Result.WRONG)] += 1
        return found


_RESULTS: dict[Wrong | bool, Result] = {True: Result.VERIFIED, False: Result.PARTIAL}


class Handovers:
    """Those under way, by their generations. The caller's lock protects it.

    results: of requests that decode here, since somebody cleared it. ready: what is to
    go out with a request's kv_transfer_params, by its generation; the same.
    """

    def __init__(
        self, groups: Sequence[AuditedGroup], secret: bytes, num_ranks: int
    ) -> None:
        self._groups, self._secret = groups, secret
        self._formats = [format_of(group, num_ranks) for group in groups]
        self._given: dict[int, Given] = {}
        self._taken: dict[int, Taken] = {}
        self._logged: set[str] = set()
        self.results = Counter[Result]()
        self.ready: dict[int, str] = {}

    def begin(self, generation: int, new: NewRequest) -> Handover:
        params = new.transfer_params
        if params is None:
            return Handover.NONE
        text = text_of(new, self._secret)
        handover = Handover.NONE
        if params.get(GIVES) and text is not None:
            assert new.prompt
            about = new.request_id, text, len(new.prompt), self._groups
            self._given[generation] = Given(*about)
            handover |= Handover.GIVES
        # Connectors of vLLM's set TAKES to False when they have begun to load.
        if KEY in params or (TAKES in params and not params.get(GIVES)):
            try:
                sent = self._open(params, text)
            except Refused as refused:
                self.results[refused.result] += 1
                self._log(refused.result, str(refused))
                return handover
            sizes = [group.shape.block_size for group in self._groups]
            self._taken[generation] = Taken(sent, sizes)
            handover |= Handover.TAKES
        return handover

    def _log(self, result: Result, why: str) -> None:
        if result not in self._logged:
            self._logged.add(result)
            logger.warning(
                "NWOR audit: loads of a request are not compared with the digests of "
                "its prefill instance: %s (%s; logged once, see "
                "vllm:nwor_audit_handovers)",
                why,
                result.value,
            )

    def _open(self, params: Mapping[str, Any], text: bytes | None) -> Sent:
        """Raises Refused."""
        if KEY not in params:
            raise Refused(
                Result.MISSING,
                f"there are none: kv_transfer_params have no {KEY!r}. The prefill "
                "instance needs VLLM_NWOR_AUDIT and the same secret, and the proxy has "
                "to pass on all of its kv_transfer_params",
            )
        sent = opened(params[KEY], self._secret)
        name = params.get("remote_request_id", sent.request_id)
        if sent.text != text or sent.request_id != name:
            raise Refused(
                Result.REQUEST,
                "they are of another request: remote_request_id, tokens, cache_salt, "
                "adapter and images must be those of the request that was prefilled",
            )
        if len(sent.parts) != len(self._formats):
            raise Refused(
                Result.FORMAT,
                f"they are of {len(sent.parts)} KV-cache groups, and "
                f"{len(self._formats)} are audited here",
            )
        for part, here in zip(sent.parts, self._formats, strict=True):
            for name, value in here.items():
                if part.format.get(name) != value:
                    raise Refused(
                        Result.FORMAT,
                        f"the {name} is {part.format.get(name)!r} there and {value!r} "
                        "here",
                    )
        return sent

    def end(self, generation: int) -> None:
        self._given.pop(generation, None)
        self._taken.pop(generation, None)

    def arrived(
        self, place: int, heads: Heads, sums: Array
    ) -> dict[tuple[int, int], Wrong | bool]:
        """The digests of a step, of a group by its place; the last place ends the step.
        Returns those of loaded blocks, as Digests.judge, by generation and block."""
        found: dict[tuple[int, int], Wrong | bool] = {}
        is_last = place == len(self._groups) - 1
        for generation, given in list(self._given.items()):
            is_its = (heads.generation == generation) & (heads.is_known == 1)
            if is_its.any():
                given.add(place, heads.of(is_its), sums[is_its])
            if is_last and (sent := given.sent(self._formats)):
                self.ready[generation] = sealed(sent, self._secret)
                self._given.pop(generation, None)
        for generation, taken in list(self._taken.items()):
            is_its = heads.generation == generation
            if is_its.any():
                verdicts = taken.judge(place, heads.of(is_its), sums[is_its])
                found |= {(generation, block): v for block, v in verdicts.items()}
            if is_last and taken.results:
                worst = (Result.WRONG, Result.PARTIAL, Result.VERIFIED)
                self.results[next(r for r in worst if taken.results[r])] += 1
                self._taken.pop(generation, None)
        return found
