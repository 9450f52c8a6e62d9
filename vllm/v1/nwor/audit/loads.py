# SPDX-License-Identifier: Apache-2.0
"""What KV connectors load, judged by its text: for connectors whose stores the audit
does not see.

At the end of a step the device takes a digest, 8 bytes a layer, of each block that a
request has filled or a load has (TakeDigests of audit_rules.h). Here is kept which
digests each text had; a text's identity is H at the block's end, so it has the adapter,
the weights, the salt and the images in it. Slots that are as they were before the load
the device reports one by one, never_loaded. Any other block is judged by the first rule
that applies:

    1  the digest is one that this text had here            verified
    2  the digest is that of a block of other tokens        other_text
    3  all of it is zero                                    never_loaded
    4  the text had other digests here, all are known, and
       nobody else fills the store                          handed_on
    5  else                                                 unverified, and remembered

Two computations of one text may differ in their bytes, so that another digest alone is
no fault: rule 4 needs a store that was empty when the engine started. Rule 2 holds for
any store: blocks of other tokens are not equal in all layers. Where two computed ones
are, equality proves nothing, and the digest is kept for neither.

Recurrent states of the prefix cache are judged so, too. Their digest is their samples
(states.h), and "other tokens" is another last token: states may be equal behind the
same last ones.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..ops import shared
from .tables import AuditedGroup

logger = logging.getLogger("vllm.v1.nwor")

# Of a group, the texts (blocks with what lies before them) that are kept.
MAX_TEXTS = 1 << 16
# Different digests of a text that are kept. With one more, rule 4 is off for it.
MAX_OF_TEXT = 4
# For texts that are not kept any more: rule 4 is off for them, and for a few others.
NUM_MARKS = 1 << 20
# In the place of a digest: the text had others that are not known.
CUT = b""
# In the place of a block's tokens and who computed it.
AMBIGUOUS = (0, 0)

Array = np.ndarray[Any, Any]

# DigestKind of audit.h.
COMPUTED, LOADED, FOUND, TAIL = range(4)
shared("DIGEST_KINDS", ("COMPUTED", "LOADED", "FOUND", "TAIL"))


class Heads(NamedTuple):
    """Columns of BlockDigest, each [n] int64."""

    text: Any
    block: Any
    position: Any
    generation: Any
    num_slots: Any
    kind: Any
    tokens: Any
    is_known: Any

    def of(self, mask: Any) -> Heads:
        return Heads(*(column[mask] for column in self))


class Wrong(NamedTuple):
    """Why a load is a finding. layer: the first of num_layers that are wrong, a column
    of `contents`. expected, found: their digests; of other_text the sums over the
    tokens. author: generation of the request that computed what was found; 0: unknown.
    offset: of the first wrong slot in the block, if that is known.
    """

    kind: str
    layer: int
    num_layers: int
    expected: int
    found: int
    author: int = 0
    offset: int = 0


class Digests:
    """Of the blocks of a KV-cache group.

    is_own: nobody but this engine fills the connector's store, which was empty when
    the audit began. False from the first commit of a block whose text is unknown on.
    """

    def __init__(self, zeros: bytes, is_own: bool, max_texts: int = MAX_TEXTS) -> None:
        """zeros: the digest of a block of zeros."""
        self.is_own = is_own
        self._zeros, self._max_texts = zeros, max_texts
        # The digests that a text had, the one used last at the end.
        self._texts: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        self._forgotten = bytearray(NUM_MARKS)
        # Whose a digest is: a sum over the block's tokens, and the generation of the
        # request; of blocks that were computed here, and of unverified loads.
        self._computed: dict[bytes, tuple[int, int]] = {}
        self._unverified: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def commit(self, text: int, tokens: int, digest: bytes, generation: int) -> None:
        """A request has filled a block. text: 0 if it is not known. digest: CUT if it
        is not known, or not right."""
        if not text:
            if self.is_own:
                logger.info(
                    "NWOR audit: loads: a block of an unknown text was computed, and "
                    "may be in the KV connector's store: loads with other bytes than "
                    "this engine computed are counted as unverified from now on"
                )
            self.is_own = False
            return
        if self._add(text, digest) and digest is not CUT:
            before = self._computed.setdefault(digest, (tokens, generation))
            if before[0] != tokens:
                self._computed[digest] = AMBIGUOUS

    def judge(
        self, text: int, tokens: int, digest: bytes, generation: int
    ) -> Wrong | bool:
        """Of a block that a load has filled. True: it is verified. False: it cannot
        be, and is remembered as it is."""
        known = self._texts.get(text, ())
        if digest in known:
            self._texts.move_to_end(text)
            return True
        is_here = digest in self._computed
        author = self._computed.get(digest) or self._unverified.get(digest)
        if author is not None and author != AMBIGUOUS and author[0] != tokens:
            return Wrong("other_text", -1, 0, tokens, *author)
        if digest == self._zeros and not is_here:
            return self._other("never_loaded", self._zeros, CUT)
        if known and CUT not in known and self.is_own:
            return self._other("handed_on", digest, *known)
        self._unverified.setdefault(digest, (tokens, generation))
        if len(self._unverified) > self._max_texts:
            self._unverified.popitem(last=False)
        self._add(text, CUT)
        return False

    def _add(self, text: int, digest: bytes) -> bool:
        """Returns whether it is kept."""
        known = self._texts.pop(text, None)
        if known is None:
            known = (CUT,) if self._forgotten[text % NUM_MARKS] else ()
        if digest not in known:
            is_full = len(known) - (CUT in known) == MAX_OF_TEXT
            if not is_full or CUT not in known:
                known = (*known, CUT if is_full else digest)
        self._texts[text] = known
        if len(self._texts) > self._max_texts:
            oldest, digests = self._texts.popitem(last=False)
            self._forgotten[oldest % NUM_MARKS] = 1
            for one in digests:
                self._computed.pop(one, None)
        return digest in known

    def _other(self, kind: str, found: bytes, *known: bytes) -> Wrong:
        """A load that is none of the known ones: against the nearest of them."""
        here = np.frombuffer(found, np.uint64)
        others = [np.frombuffer(one or bytes(len(found)), np.uint64) for one in known]
        differs = min((here != one for one in others), key=np.count_nonzero)
        layer = int(differs.argmax())
        nearest = next(one for one in others if np.array_equal(here != one, differs))
        values = int(nearest[layer]), int(here[layer])
        return Wrong(kind, layer, int(np.count_nonzero(differs)), *values)


# --- zeros ----------------------------------------------------------------------------


def zeros_of(group: AuditedGroup) -> bytes:
    """The digest of a block of zeros."""
    sizes = {layer.name: layer.layout.slot_bytes for layer in group.layers}
    sums = [_zero_sum(sizes[name], group.shape.block_size) for name in group.names]
    return np.array(sums, np.uint64).tobytes()


@cache
def _zero_sum(slot_bytes: int, block_size: int) -> np.uint64:
    sums = word_at(np.uint64(0), np.arange(-(-slot_bytes // 8))) >> np.uint64(32)
    checksum = sums.sum() & np.uint64(0xFFFFFFFF)
    return word_at(checksum, np.arange(block_size)).sum()


def word_at(words: Array | np.uint64, indices: Array) -> Array:
    """As word_at of audit_rules.h, of uint64."""
    number = indices.astype(np.uint64) + np.uint64(1)
    return mix64(words + number * np.uint64(0x9E3779B97F4A7C15))


def mix64(words: Array) -> Array:
    """As mix64 of audit_rules.h."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
