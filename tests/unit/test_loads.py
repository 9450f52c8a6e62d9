# SPDX-License-Identifier: Apache-2.0
"""The rules by which loads are judged, on digests of two layers."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from vllm_nwor.audit import loads as under_test
from vllm_nwor.audit.loads import CUT, MAX_OF_TEXT, Digests, Wrong

ZEROS = np.array([3, 4], np.uint64).tobytes()
# Identities of texts; of tokens; generations.
ONE, TWO, THREE = 11, -22, 33
A, B = 101, 102
FIRST, SECOND, LAST = 1, 2, 9


def digest(*layers: int) -> bytes:
    return np.array(layers, np.uint64).tobytes()


def digests(is_own: bool = True, **more: int) -> Digests:
    """Of one text: tokens A, whose layers have 5 and 6."""
    found = Digests(ZEROS, is_own, **more)
    found.commit(ONE, A, digest(5, 6), FIRST)
    return found


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("text", [TWO, THREE])
def test_a_block_of_other_tokens_is_a_finding_whoever_stored_it(is_own, text):
    """Whether or not the text is known."""
    of = digests(is_own)
    of.commit(TWO, B, digest(7, 8), SECOND)
    wrong = Wrong("other_text", -1, 0, B, A, FIRST)
    assert of.judge(text, B, digest(5, 6), LAST) == wrong
    assert of.judge(text, B, digest(5, 6), LAST) == wrong  # it is not remembered


def test_equal_tokens_behind_other_ones_may_have_equal_bytes():
    """In a window, or by an adapter that changes nothing."""
    of = digests(is_own=False)
    assert of.judge(TWO, A, digest(5, 6), LAST) is False


def test_where_two_computed_blocks_are_equal_equality_proves_nothing():
    of = digests(is_own=False)
    of.commit(TWO, B, digest(5, 6), SECOND)
    assert of.judge(THREE, 103, digest(5, 6), LAST) is False
    assert of.judge(ONE, A, digest(5, 6), LAST) is True


def test_zeros_are_a_finding_unless_a_text_has_them():
    of = digests(is_own=False)
    assert of.judge(ONE, A, ZEROS, LAST) == Wrong("never_loaded", 0, 2, 0, 3)
    of.commit(ONE, A, ZEROS, FIRST)
    assert of.judge(ONE, A, ZEROS, LAST) is True
    of.commit(TWO, B, ZEROS, FIRST)
    assert of.judge(THREE, 103, ZEROS, LAST) is False


def test_another_digest_of_a_known_text_is_a_finding_in_an_own_store():
    """Against the version that it is nearest to."""
    of = digests()
    of.commit(ONE, A, digest(7, 8), SECOND)
    wrong = of.judge(ONE, A, digest(7, 9), LAST)
    assert wrong == Wrong("handed_on", 1, 1, 8, 9)
    assert of.judge(ONE, A, digest(1, 2), LAST) == Wrong("handed_on", 0, 2, 5, 1)


def test_an_unknown_text_is_unverified_and_remembered():
    """It stays so when the text is computed here, with other bytes: the store may hold
    more than one version. Its block for another text is a finding."""
    of = digests()
    for _ in range(2):
        assert of.judge(TWO, B, digest(7, 8), SECOND) is False
    of.commit(TWO, B, digest(7, 9), FIRST)
    assert of.judge(TWO, B, digest(7, 9), LAST) is True
    assert of.judge(TWO, B, digest(7, 8), LAST) is False
    found = of.judge(ONE, A, digest(7, 8), LAST)
    assert found == Wrong("other_text", -1, 0, A, B, SECOND)


def test_a_text_with_one_version_more_is_unverified_for_good():
    of = digests()
    for number in range(MAX_OF_TEXT - 1):
        of.commit(ONE, A, digest(50, number), FIRST)
    assert isinstance(of.judge(ONE, A, digest(50, 60), LAST), Wrong)
    for _ in range(2):
        of.commit(ONE, A, digest(50, 61), FIRST)
        for found in (61, 60):
            assert of.judge(ONE, A, digest(50, found), LAST) is False
    # The versions that are kept are known as before, and no other is.
    assert of.judge(ONE, A, digest(5, 6), LAST) is True
    assert of.judge(ONE, A, digest(50, MAX_OF_TEXT - 2), LAST) is True
    assert len(of._computed) == MAX_OF_TEXT


@pytest.mark.parametrize("number", [0, MAX_OF_TEXT])
def test_a_block_without_a_digest_is_a_version_that_is_not_known(number):
    of = digests()
    for version in range(1, number):
        of.commit(ONE, A, digest(50, version), FIRST)
    for _ in range(2):
        of.commit(ONE, A, CUT, FIRST)
    assert of.judge(ONE, A, digest(50, 60), LAST) is False
    assert of.judge(ONE, A, digest(5, 6), LAST) is True


def test_texts_that_are_used_stay_and_the_others_go():
    of = digests(max_texts=2)
    of.commit(TWO, B, digest(7, 8), SECOND)
    assert of.judge(ONE, A, digest(5, 6), LAST) is True
    of.commit(THREE, 103, digest(1, 2), SECOND)
    assert len(of) == 2
    assert of.judge(ONE, A, digest(5, 6), LAST) is True
    assert of._computed.keys() == {digest(5, 6), digest(1, 2)}
    # It had a version that is forgotten, which the store may still have.
    of.commit(TWO, B, digest(7, 9), SECOND)
    assert of.judge(TWO, B, digest(7, 8), LAST) is False


def test_what_is_remembered_of_unverified_loads_is_bounded():
    of = digests(max_texts=2)
    for number in range(5):
        assert of.judge(1000 + number, B, digest(number, 0), LAST) is False
    assert len(of) == len(of._unverified) == 2


def test_an_unknown_text_that_is_computed_ends_the_rule_for_own_stores():
    """Whatever it is a version of may have been stored."""
    of = digests()
    of.commit(0, A, CUT, SECOND)
    assert of.judge(ONE, A, digest(5, 7), LAST) is False


@pytest.mark.parametrize(("num_versions", "is_loaded"), [(1, 0), (4, 0), (1, 1)])
def test_the_tables_take_what_the_docs_say(num_versions, is_loaded):
    """Of 32 layers."""
    docs = Path(__file__).parents[2] / "docs/audit.md"
    text = r"([\d,]+) texts, about" + 3 * r".*?(\d+)(?: bytes)? and 8 a layer for each"
    said = re.search(text, docs.read_text(encoding="utf-8"))
    num_texts, *sizes = (int(n.replace(",", "")) for n in said.groups())
    first, further, loaded = (size + 8 * 32 for size in sizes)
    of = Digests(bytes(8 * 32), True)
    number = 20_000
    tracemalloc.start()
    try:
        for text in range(1, number):
            for version in range(num_versions + is_loaded):
                data = np.full(32, 8 * text + version, np.uint64).tobytes()
                use = of.judge if version == num_versions else of.commit
                use(text + (use == of.judge) << 40, text << 41, data, text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expected = first + (num_versions - 1) * further + is_loaded * loaded
    assert peak / number == pytest.approx(expected, rel=0.1)
    assert num_texts == under_test.MAX_TEXTS
