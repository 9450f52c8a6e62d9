# SPDX-License-Identifier: Apache-2.0
"""The cases of the conformance kit for KV connectors (conformance.py).

A case plays requests in an engine (connector_bench.py), once with the connector and
once without one, and says which of them have to load, and which must not. It never
looks at outputs: they are compared with those of the engine without a connector.

A `planted` case puts a fault into what the connector loads. It says nothing about the
connector, but whether the kit would see such a fault: then it is ok.

    python -m vllm_nwor.audit.conformance_cases FD REQUEST FOLDER

plays cases in this process. FD: where the reports go, one JSON object a line. REQUEST:
JSON, the fields of connector_bench.Request. FOLDER: an empty one, for the connector.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .connector_bench import FOLDER, Request, WrongArgument, find_connector
from .connector_bench import ConnectorBench as Bench

# A start, or a case, that hangs ends with its process. On a busy machine a start has
# been seen to take four minutes.
START_SECONDS, CASE_SECONDS = 900, 300


@dataclass(frozen=True)
class Case:
    """engine: a key of conformance.ENGINES."""

    play: Callable[[Bench], None]
    engine: str = "base"
    is_planted: bool = False

    @property
    def about(self) -> str:
        return " ".join((self.play.__doc__ or "").split())


def _evicted_text(bench: Bench, length: int, count: int = 8, **how: Any) -> list[int]:
    """Plays a text as request "first"; then the local prefix cache loses it. count,
    how: as Bench.ask."""
    text = bench.text(1, length)
    bench.ask("first", text, count, **how)
    bench.evict()
    return text


def store_load(bench: Bench) -> None:
    """A text comes again when the local prefix cache has lost it."""
    text = _evicted_text(bench, 100)
    bench.ask("again", text)
    bench.must_load("again")


def evicted(bench: Bench) -> None:
    """Of a text that was evicted, another request has brought the first block back: the
    rest is loaded behind it."""
    text = _evicted_text(bench, 150)
    bench.ask("head", text[: bench.block_size + 8])
    bench.ask("again", text)
    bench.must_load("again")
    if bench.connector is not None and not bench.local("again"):
        bench.skip("nothing of the text was in the local cache")


def longer_local(bench: Bench) -> None:
    """The local prefix cache has as much of the text as the connector, or more: then
    there is nothing to load, not less than nothing."""
    text = bench.text(1, 3 * bench.block_size + 1)
    bench.ask("short", text[:-27])
    bench.ask("first", text)
    bench.ask("again", text)
    bench.must_not_load("again")


def partial_tail(bench: Bench) -> None:
    """A text that ends within a block comes again, with two other continuations."""
    text = _evicted_text(bench, 80)
    for number, name in enumerate(("again", "other"), 2):
        bench.ask(name, text + bench.text(number, 9))
        bench.must_load(name)
        bench.evict()


def chunked_prompt(bench: Bench) -> None:
    """A prompt that takes more than one step is stored and loaded as a whole."""
    text = _evicted_text(bench, 300)
    bench.ask("again", text)
    bench.must_load("again", beyond=256)


def rejected_drafts(bench: Bench) -> None:
    """Answers, made with drafts of which some are rejected, end next to the end of a
    block. They come again in a prompt: at most what ran may be loaded, and a block that
    lacks the last token, which never runs, must not be."""
    end = 2 * bench.block_size
    texts = {n: bench.text(n, 40) for n in range(4)}
    for number, text in texts.items():
        bench.ask(f"first{number}", text, end - len(text) + number)
    answers = {n: bench.answer(f"first{n}") for n in texts}
    bench.evict()
    for number, text in texts.items():
        bench.ask(f"later{number}", [*text, *answers[number], 7, 8])
    for number in (1, 2, 3):
        bench.must_load(f"later{number}", beyond=end - 1)


def preemption(bench: Bench) -> None:
    """Requests need more blocks than there are: some are preempted, and load what they
    had when they go on."""
    for number in range(4):
        bench.add(f"many{number}", bench.text(number, 60), 70)
    bench.run()
    names = {name.rpartition("-")[0] for name in bench.preempted}
    if bench.connector is not None and not any(map(bench.report.loads.get, names)):
        bench.skip(f"{len(names)} requests were preempted, and none of them loaded")


def abort_loading(bench: Bench) -> None:
    """A request is aborted while its load is under way; others come meanwhile."""
    text = _evicted_text(bench, 100)
    bench.is_held = True
    bench.add("doomed", text, 8)
    bench.begin("doomed")
    is_loading = bench.is_loading("doomed")
    bench.llm.abort_request(["doomed"])
    bench.add("others", bench.text(2, 100), 8)
    bench.step(3)
    bench.is_held = False
    bench.run()
    bench.ask("again", text)
    if bench.connector is not None and not is_loading:
        bench.skip("no load was under way: this connector loads within a step")


def one_prefix(bench: Bench) -> None:
    """Two requests that share a prefix come in one step, and both need it."""
    text = _evicted_text(bench, 100)
    for number, name in enumerate(("left", "right"), 2):
        bench.add(name, text + bench.text(number, 9), 8)
    bench.run()
    if bench.connector is not None and not sum(bench.report.loads.values()):
        bench.skip("neither of the two loaded")


def cache_salt(bench: Bench) -> None:
    """A text of one tenant (cache_salt) is loaded for that tenant alone."""
    text = _evicted_text(bench, 100, salt="one")
    bench.ask("other", text, salt="two")
    bench.must_not_load("other")
    bench.evict()
    bench.ask("none", text)
    bench.must_not_load("none")
    bench.evict()
    bench.ask("again", text, salt="one")
    bench.must_load("again")


def lora_adapter(bench: Bench) -> None:
    """A text of one LoRA adapter is loaded for that adapter alone."""
    text = bench.text(1, 100)
    one, two = bench.adapters
    for name, adapter in (("first", None), ("other", one), ("third", two)):
        bench.ask(name, text, adapter=adapter)
        bench.must_not_load(name)
        bench.evict()
    for name, adapter in (("again", None), ("other again", one)):
        bench.ask(name, text, adapter=adapter)
        bench.must_load(name)
        bench.evict()


def sliding_window(bench: Bench) -> None:
    """A model whose layers see 64 tokens back: vLLM frees the blocks before these while
    the request runs."""
    text = _evicted_text(bench, 150, 40)
    bench.ask("again", text, 40)
    bench.must_load("again")


def failed_load(bench: Bench) -> None:
    """What the scheduler was promised is gone when the worker loads it: the files in
    {folder} are removed in between. The connector has to report the blocks."""
    text = _evicted_text(bench, 100)
    num_files, num_failed = [], bench.num_failed
    bench.on_load = lambda *_: num_files.append(bench.drop_files())
    bench.ask("again", text)
    bench.on_load = None
    bench.must_load("again")
    if bench.connector is not None and num_files:
        if not num_files[0]:
            bench.skip("the connector keeps no file in {folder}")
        elif bench.num_failed == num_failed:
            bench.skip("no failed load was reported: the data may be elsewhere, too")


def _planted(bench: Bench, planted: Callable[[Any, Any], Any]) -> None:
    text = _evicted_text(bench, 100)
    with bench.bent_loads(planted) as bent:
        bench.ask("again", text)
    bench.must_load("again")
    if bench.connector is not None and not bent:
        bench.skip("no load was seen to end")


def late_load(bench: Bench) -> None:
    """Planted: what a load brings is there one step after it was reported."""
    late: list[Any] = []

    def bend(before: Any, blocks: list[int]) -> None:
        late.append(([[run.clone() for run in bench.rows(b)] for b in blocks], blocks))
        bench.put(before, blocks)

    step = bench.step

    def and_put(count: int = 1) -> None:
        step(count)
        while late and bench.scheduler.running:
            bench.put(*late.pop())

    with patch.object(bench, "step", and_put):
        _planted(bench, bend)


def empty_load(bench: Bench) -> None:
    """Planted: a load brings nothing, and is reported as done."""
    _planted(bench, bench.put)


def wrong_offset(bench: Bench) -> None:
    """Planted: what a load brings is one block further than it should be."""

    def bend(before: Any, blocks: list[int]) -> None:
        found = [[run.clone() for run in bench.rows(block)] for block in blocks]
        bench.put(before[:1] + found[:-1], blocks)

    _planted(bench, bend)


def sleep(bench: Bench) -> None:
    """The engine sleeps (level 1) and wakes up: what the connector kept is right, or it
    was dropped. On a CPU vLLM drops nothing; the kit overwrites the KV cache."""
    text = bench.text(1, 100)
    bench.ask("first", text)
    bench.settle()  # vLLM refuses to sleep while blocks are held for a store
    bench.llm.sleep(1)
    bench.clear()
    bench.llm.wake_up()
    bench.ask("second", text)
    bench.evict()
    bench.ask("again", text)
    bench.must_load("again")


_BASE = (
    *(store_load, evicted, longer_local, partial_tail, chunked_prompt, rejected_drafts),
    *(preemption, abort_loading, one_prefix, cache_salt, sleep, failed_load),
)
CASES = {
    **{play.__name__: Case(play) for play in _BASE},
    **{
        play.__name__: Case(play, is_planted=True)
        for play in (late_load, empty_load, wrong_offset)
    },
    "lora_adapter": Case(lora_adapter, "adapter"),
    "sliding_window": Case(sliding_window, "sliding"),
}


def cause(error: BaseException, connector: type | None) -> str:
    """One line: the error, and where; in the connector's file if it was there."""
    frames = traceback.extract_tb(error.__traceback__)
    file = inspect.getsourcefile(connector) if connector else None
    own = [frame for frame in frames if frame.filename == file]
    places = [f" ({Path(one.filename).name}:{one.lineno})" for one in own or frames]
    where = "".join(places[-1:])
    return f"{type(error).__name__}: {error}{where}".replace("\n", " ")


def main() -> None:
    reports, request = os.fdopen(int(sys.argv[1]), "w"), json.loads(sys.argv[2])
    request, folder = Request(**request), sys.argv[3]

    def send(**message: Any) -> None:
        print(json.dumps(message), file=reports, flush=True)

    faulthandler.enable(all_threads=False)
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    try:
        if request.checks:
            find_connector(request.checks)
        bench = Bench(request, folder)
    except WrongArgument as error:
        return send(wrong=str(error))
    except Exception as error:
        return send(unstarted=cause(error, None))
    for name in request.cases:
        send(begins=name)
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        started = time.monotonic()
        try:
            report = bench.play(list(CASES).index(name), CASES[name].play)
        except Exception as error:
            text = cause(error, bench.connector)
            bench.report.died = text.replace(folder, FOLDER)
            report = bench.report
        report.seconds = time.monotonic() - started
        send(case=name, report=vars(report))
        if report.died or report.unfreed:
            return  # what it leaves is not for other cases


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # vLLM's own end takes seconds, and threads of a connector may never end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
