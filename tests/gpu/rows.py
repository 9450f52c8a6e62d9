# SPDX-License-Identifier: Apache-2.0
"""The rows: the requests that each engine of the GPU tests runs.

A row is one or more phases, one after another; a phase is a set of requests, each with
the number of the engine step before which it arrives or is aborted. With NWOR off and
on the same row gives the same batches, since the in-process engine does not depend on
time.

Imports neither torch nor vLLM.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.prompts import TEXTS

from tests.gpu.engines import MAX_NUM_SEQS, EngineSpec
from tests.helpers.environment import model_path
from tests.helpers.player import Request

# When a row runs: before any sleep, after sleeps of levels 1 and 2, and after one while
# requests ran.
PHASES = ("awake", "level 1", "live", "level 2")
SLEEP_ROWS = ("batch 8", "seeded sampling", "prefix caching")
# With these drafters vLLM computes the last block of a prefix match again.
LOOKING_BACK = ("eagle", "mtp", "dspark")
# Row "hits at once": tokens that prompts share, or have behind another's text.
_SHARED, _TAIL = 150, 20
# Prompts use few tokens, so that ngram finds matches.
_FIRST_TOKEN, _NUM_PROMPT_TOKENS = 10, 40


@dataclass(frozen=True)
class Row:
    """needs: what must happen in the row (see compare.py)."""

    name: str
    phases: tuple[tuple[Request, ...], ...]
    needs: frozenset[str] = frozenset()


def prompt(seed: object, length: int) -> tuple[int, ...]:
    draw = random.Random(str(seed))
    last = _FIRST_TOKEN + _NUM_PROMPT_TOKENS - 1
    return tuple(draw.randint(_FIRST_TOKEN, last) for _ in range(length))


_PLAIN: dict[str, Any] = {"logprobs": 2}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = "(ab|cd)[0-9]{10,30}(x|yz)"
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": REGEX}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": REGEX}, "temperature": 0.8, "seed": 5},
)


def warm_up() -> Row:
    """First uses of kernels and scale caches."""
    params = [{"temperature": 0.8 * (i % 2), "seed": i} | _PLAIN for i in range(4)]
    return Row("warm-up", (_batch("warm", 4, 28, 12, params=params),))


def rows(spec: EngineSpec) -> tuple[Row, ...]:
    """The rows for this engine. vLLM's CPU_MLA is slow, samples greedily only, and has
    neither chunked prefill nor prefix caching."""
    if spec.real:
        return _of_texts()
    if spec.backend == "CPU_MLA":
        return (Row("batch 8", (_batch("eight", 8, 12, 10, stagger=1),)),)
    if spec.loras:
        return (Row("LoRA", (_adapted(),), frozenset({"cached", "different"})),)
    # With a sliding window vLLM caches too few blocks.
    at_once = frozenset(() if spec.windows else ("hit at once",))
    return (
        Row("batch 1", ((Request("one/0", prompt("one", 30), 48, params=_PLAIN),),)),
        Row("batch 8", (_batch("eight", 8, 40, 32, stagger=1),)),
        Row("batch 64", (_batch("many", 64, 12, 16),)),
        Row("seeded sampling", (_sampled(),)),
        Row("aborts", (_aborted(),), frozenset({"dropped"})),
        Row("preemption", (_too_many(spec),), frozenset({"preempted"})),
        Row("prefix caching", _returning("prefix", 150), frozenset({"cached"})),
        Row("hits at once", (_sharing(),), at_once),
        Row("ids again", _ids_again(spec), frozenset({"cached", "dropped"})),
        Row("two outputs", (_in_two(),), frozenset({"cached", "different"})),
        Row("chunked prefill", (_mixed(),), frozenset({"chunked"})),
        Row("structured output", (_structured(),), frozenset({"structured"})),
    )


def _of_texts() -> tuple[Row, ...]:
    """Rows of SmolLM2: built-in texts in its chat form."""
    from tokenizers import Tokenizer

    path = Path(model_path("smollm2-135m"), "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    forms = (f"<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n" for t in TEXTS)
    texts = [tuple(tokenizer.encode(form).ids) for form in forms]

    def of(name: str, params: dict[str, Any]) -> tuple[Request, ...]:
        return tuple(
            Request(f"{name}/{i}", ids, 96, at=i, params=params | {"seed": i})
            for i, ids in enumerate(texts)
        )

    sampled = {"temperature": 0.8} | _PLAIN
    again = (of("first", _PLAIN), of("again", _PLAIN))
    return (
        Row("batch 8", (of("eight", _PLAIN),)),
        Row("seeded sampling", (of("sampled", sampled),)),
        Row("prefix caching", again, frozenset({"cached"})),
    )


def block_ends(has_salts: bool = False) -> Row:
    """Texts that are found in blocks of several hundred tokens: prompts that share
    their begin, unless each has a salt, and what requests wrote across the end of a
    block."""
    shared = prompt("shared states", 1200)
    writing = _batch("writing", 4, 300, 600, stagger=3)
    joining = Request(
        "joining/0", prompt("tail", _TAIL), 24, 8, params=_PLAIN, behind="writing/"
    )
    sharing = tuple(
        Request(
            f"sharing/{i}",
            shared[: 600 + 120 * i] + prompt(i, 30),
            24,
            at=2 * i,
            params=_PLAIN,
            salt=f"{i}" if has_salts else None,
        )
        for i in range(6)
    )
    first = (Request("first/0", shared, 24, params=_PLAIN),)
    return Row("block ends", (first, sharing, (*writing, joining)))


def few_tokens() -> Row:
    """Prompts around a kernel's chunk of 64 tokens; texts of one token."""
    short = (Request(f"short/{n}", prompt(f"short {n}", n), 6) for n in range(1, 66))
    constant = _batch("constant", 8, 0, 40, 1, ({}, {"allowed_token_ids": [20]}))
    constant = tuple(replace(one, prompt=(20,) * 40 * (one.at + 1)) for one in constant)
    return Row("few tokens", (tuple(short), constant))


def rows_of(spec: EngineSpec, *names: str) -> list[Row]:
    """Those of these rows that the engine has."""
    known = {row.name: row for row in rows(spec)}
    return [known[name] for name in names if name in known]


def batch_8(spec: EngineSpec) -> Row:
    return rows_of(spec, "batch 8")[0]


def offloaded() -> Row:
    """A prompt that is evicted and comes back from the host. One request at a time,
    since loads take different times."""
    return Row("offloaded", _returning("offload", 500, 500))


def stored(spec: EngineSpec) -> tuple[tuple[Request, ...], tuple[Request, ...]]:
    """Texts that a connector stores, and others that then need all blocks. Unless the
    model is a hybrid, a prompt runs in one step, and is too long for a CUDA graph.
    ExampleConnector does not find one of n blocks and one token: lengths are even."""
    length = 1200 if spec.hybrid else 400

    def of(name: str, number: int, max_tokens: int) -> tuple[Request, ...]:
        return tuple(
            Request(
                f"{name}/{i}",
                prompt(f"{name} {i}", length - 14 * i % 60),
                max_tokens,
                at=4 * i,
                params=_PLAIN,
            )
            for i in range(number)
        )

    return of("stored", 5, 24), of("other", 12, 4)


def as_long_as_windows(spec: EngineSpec) -> Row:
    """Prompts of about 1 + k tokens, alone and then beside a longer one; eight of 1 + k
    together, alone and among windows."""
    size = 1 + spec.num_drafts

    def of(name: str, length: int, number: int, at: int = 0) -> Request:
        tokens = prompt(f"window {length} {number}", length)
        return Request(f"{name}/{length}/{number}", tokens, 12, at=at, params=_PLAIN)

    lengths = range(max(size - 2, 1), size + 3)
    return Row(
        "as long as windows",
        (
            *((of("alone", length, 0),) for length in lengths),
            *((of("beside", n, 0), of("longer", 30, n)) for n in lengths),
            tuple(of("together", size, number) for number in range(8)),
            tuple(of("among", size, number, at=number) for number in range(8)),
        ),
    )


def padded_prompts(alone: bool = False) -> Row:
    """Prompts of one token that come while others run: vLLM pads them with drafts."""
    ones = tuple(
        Request(f"padded/{n}", (n + 20,), 12, at=6 * n + 10, params=_PLAIN)
        for n in range(4)
    )
    if alone:
        return Row("one by one", tuple((one,) for one in ones))
    return Row("padded prompts", ((*_batch("running", 4, 30, 160), *ones),))


def taken_for_windows(
    spec: EngineSpec, batches: Sequence[Sequence[tuple[str, int]]]
) -> set[str]:
    """Requests whose prompt ran in a step in which all had 1 + k tokens."""
    size, seen, found = 1 + spec.num_drafts, set[str](), set[str]()
    for batch in batches:
        names = {name for name, _ in batch}
        if all(number == size for _, number in batch):
            found |= names - seen
        seen |= names
    return found


def _batch(
    name: str,
    size: int,
    length: int,
    max_tokens: int,
    stagger: float = 0,
    params: Sequence[dict[str, Any]] = (_PLAIN,),
) -> tuple[Request, ...]:
    """Requests of different lengths, `stagger` steps apart; `params` repeat."""
    return tuple(
        Request(
            f"{name}/{i}",
            prompt(f"{name} {i}", length - 8 + (5 * i) % 16),
            max_tokens + i % 5,
            at=int(i * stagger),
            params=params[i % len(params)],
        )
        for i in range(size)
    )


def _sampled() -> tuple[Request, ...]:
    """Temperature 0.8 with seeds; some with top_p; one greedy."""
    params: list[dict[str, Any]]
    params = [{"temperature": 0.8, "seed": 100 + i} | _PLAIN for i in range(7)]
    for i in (1, 4):
        params[i]["top_p"] = 0.9
    return _batch("sampled", 8, 36, 32, params=[*params, _PLAIN])


def _aborted() -> tuple[Request, ...]:
    """Three of eight are aborted while they run, two of them in the same step."""
    requests = list(_batch("aborts", 8, 38, 40, stagger=0.5))
    for i, step in ((1, 6), (4, 9), (6, 9)):
        requests[i] = replace(requests[i], max_tokens=160, abort_at=step)
    return tuple(requests)


def _too_many(spec: EngineSpec) -> tuple[Request, ...]:
    """Requests that need a third more slots than there are."""
    if spec.hybrid:  # more blocks than there are, when each needs another one
        return _batch("crowd", MAX_NUM_SEQS, 160, 440, stagger=0.25)
    length, max_tokens = 150, 300
    count = -(-spec.num_slots * 4 // 3 // (length + max_tokens))
    return _batch("crowd", count, length + 8, max_tokens, stagger=0.25)


def _returning(name: str, *others: int) -> tuple[tuple[Request, ...], ...]:
    """A phase each: a prompt, others of these lengths, the prompt with another end."""
    shared = prompt(name, 200)
    between = (prompt(f"{name} {i}", length) for i, length in enumerate(others))
    prompts = (shared + prompt("x", 20), *between, shared + prompt("y", 30))
    return tuple(
        (Request(f"{name}/{i}", tokens, 24 + i, params=_PLAIN),)
        for i, tokens in enumerate(prompts)
    )


def _sharing() -> tuple[Request, ...]:
    """While others verify drafts, two requests of one text arrive together: the second
    finds cached blocks that the first writes in the same step. Another one's prompt is
    a running request's text, and arrives when a target row fills its last block: that
    block is found in the step that writes it (with an asynchronous scheduler one step
    later, while the step may still run). With drafters of LOOKING_BACK vLLM leaves out
    the last block of a match."""
    shared = prompt("shared", _SHARED)
    return (
        *_batch("leading", 8, 40, 160),
        *(
            Request(f"sharing/{i}", shared + prompt(i, 30), 24, at=4, params=_PLAIN)
            for i in range(2)
        ),
        Request(
            "joining/0", prompt("tail", _TAIL), 24, 5, params=_PLAIN, behind="leading/"
        ),
    )


def hits_at_once(
    spec: EngineSpec, batches: Sequence[Sequence[tuple[str, int]]]
) -> bool:
    """Whether a row of `_sharing` had these prefix hits."""
    firsts: dict[str, tuple[int, int]] = {}  # batch, and tokens in it
    for number, batch in enumerate(batches):
        for name, num_tokens in batch:
            firsts.setdefault(name, (number, num_tokens))
    (one, _), (other, num_other) = firsts["sharing/0"], firsts["sharing/1"]
    number, num_tokens = firsts["joining/0"]
    are_beside = [num for name, num in batches[number] if "leading" in name]
    lacks = (0, spec.block_size) if spec.drafter in LOOKING_BACK else (0,)
    return (
        one == other
        and num_other < _SHARED
        and num_tokens - _TAIL in lacks
        and max(are_beside, default=0) > 1
    )


def _ids_again(spec: EngineSpec) -> tuple[tuple[Request, ...], ...]:
    """The ids of an aborted request and of a finished one are used again, with another
    end of the text. Asynchronous engines get the first one a step later: vLLM would
    give it the output of the step in flight."""
    text = prompt("again", 140)

    def request(number: int, tail: str, max_tokens: int, **more: Any) -> Request:
        tokens = text + prompt(tail, 12)
        return Request(f"again/{number}", tokens, max_tokens, params=_PLAIN, **more)

    first = (
        *_batch("beside", 3, 30, 60),
        request(0, "one", 160, abort_at=8),
        request(1, "two", 20),
        request(0, "three", 40, at=8 + spec.asynchronous),
    )
    return first, (request(1, "four", 40),)


def _in_two() -> tuple[Request, ...]:
    """Two sampled outputs of each prompt; the second finds it cached."""
    params = {"n": 2, "temperature": 0.8, "seed": 7} | _PLAIN
    return _batch("two", 4, 140, 32, stagger=1, params=[params])


def _adapted() -> tuple[Request, ...]:
    """One text with each adapter and with none; then as the beginning of another one.
    Fewer than 128 tokens a step: from there on vLLM's LoRA kernels add in no fixed
    order (split_k of lora/ops/triton_ops/utils.py)."""
    text = prompt("adapted", 40)
    return (
        *(
            Request(f"adapted/{i}", text, 32, params=_PLAIN, lora=lora)
            for i, lora in enumerate((1, 2, None))
        ),
        Request("adapted/3", text + prompt("end", 9), 32, 6, params=_PLAIN, lora=1),
    )


def _mixed() -> tuple[Request, ...]:
    """Long prompts, together more than a step's tokens, arrive among decoders."""
    long = _batch("long", 3, 408, 20)
    return _batch("decoding", 4, 20, 60) + tuple(replace(r, at=5) for r in long)


def _structured() -> tuple[Request, ...]:
    """GRAMMARS, and two requests without one.

    An asynchronous engine of vLLM 0.26, and of 0.33 on V1, runs drafts that a grammar
    forbids, and masks their logits. "synthetic" rejection ignores logits and accepts
    some, and vLLM ends the request with an error (v1/core/sched/scheduler.py:1745 of
    0.26.0): the row is "unmet" on those engines."""
    params = [kind | {"ignore_eos": False} for kind in GRAMMARS]
    return _batch("free", 2, 20, 30) + _batch("grammar", 3, 26, 48, params=params)
