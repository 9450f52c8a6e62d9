# SPDX-License-Identifier: Apache-2.0
"""The requests' prompts: built-in texts, the user's file, or token ids of a set length.

The built-in texts ask for repeating, editing and summarising, where drafts by ngram
have something to find. With random weights there is no tokenizer and no meaning: the
prompt is then a run of ids that repeats, so that ngram finds something there too.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import BadArgument

BUILT_IN = Path(__file__).with_name("prompts.json")
RANDOM_PROMPT_TOKENS = 256
_PHRASE_TOKENS = 24


def read(path: Path | None) -> list[str]:
    """The texts in `path`, or the built-in ones. Raises BadArgument: the file cannot be
    read, or holds no prompt."""
    try:
        found = json.loads((path or BUILT_IN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = error
    texts = found if isinstance(found, list) else []
    if not texts or not all(isinstance(one, str) and one.strip() for one in texts):
        raise BadArgument(
            f"argument --prompts: '{path}' holds {found!r:.80}; allowed values: a JSON "
            "file with a list of texts, none of them empty"
        )
    return texts


def encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each text by a Hugging Face tokenizer, in the model's chat form if
    it has one."""
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


def fill(prompts: Sequence[list[int]], batch_size: int) -> list[list[int]]:
    """At least one whole batch: the prompts, from the start again as often as needed,
    up to the next multiple of `batch_size`, so that every wave is full."""
    waves = -(-len(prompts) // batch_size)
    return list(itertools.islice(itertools.cycle(prompts), waves * batch_size))
