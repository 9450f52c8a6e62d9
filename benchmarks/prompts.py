# SPDX-License-Identifier: Apache-2.0
"""The requests' prompts: built-in texts, or token ids of a set length.

The texts ask for repeating, editing and summarising, where ngram finds drafts. With
random weights there is no tokenizer and no meaning: the prompt is then a run of ids
that repeats, so that ngram finds something there too.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXTS: list[str] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
RANDOM_PROMPT_TOKENS = 256
_PHRASE_TOKENS = 24


def encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each text by a tokenizer, in the model's chat form if it has one."""
    if tokenizer.chat_template is None:
        return [list(tokenizer.encode(text)) for text in texts]
    options = {"tokenize": False, "add_generation_prompt": True}
    chats = ([{"role": "user", "content": text}] for text in texts)
    forms = (tokenizer.apply_chat_template(chat, **options) for chat in chats)
    return [list(tokenizer.encode(form, add_special_tokens=False)) for form in forms]


def random_ids(num_prompts: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`num_prompts` prompts of RANDOM_PROMPT_TOKENS ids: a phrase, again and again."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        phrase = [draw.randrange(3, vocab_size) for _ in range(_PHRASE_TOKENS)]
        prompts.append(to_length(phrase, RANDOM_PROMPT_TOKENS))
    return prompts


def to_length(ids: Sequence[int], length: int) -> list[int]:
    """The first `length` ids of `ids` repeated without end."""
    return list(itertools.islice(itertools.cycle(ids), length))
