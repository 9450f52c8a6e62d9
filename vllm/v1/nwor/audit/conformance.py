# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nwor.audit --connector MODULE:CLASS`: does a KV connector keep vLLM's
contract?

Each case of conformance_cases.py runs in an engine with the connector, and in one
without. Engines are processes of their own: one that ends takes a case with it, and the
next case gets a new one. Five verdicts on each case:

    survives   the engine has not ended
    outputs    tokens, and logprobs to 0.001, are those of the engine without connector
    exercised  the connector loaded where it has to, and nowhere else
    bytes      the audit found nothing, and verified what was loaded
    blocks     all of them are free at the end

A case is `ok` only if it was exercised.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch

from .bench import MODEL
from .conformance_cases import CASES, Case
from .connector_bench import Report, Request, WrongArgument

MAX_DIFFERENCE = 1e-3  # of logprobs
WINDOW = 64
NO_START = "the engine does not start"
# What the model of an engine is instead of MODEL, and arguments of the engine.
# In float32, logprobs of a text that was decoded and of one that was prefilled agree.
BUDGET = {"dtype": "float32", "max_num_batched_tokens": 256, "max_model_len": 352}
WITHOUT_DRAFTS = {"speculative_config": None}  # they take 10 s to compile
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, BUDGET),
    "adapter": ({}, BUDGET | WITHOUT_DRAFTS | LORA),
    "sliding": (
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": WINDOW,
        },
        BUDGET | WITHOUT_DRAFTS,
    ),
}


class State(StrEnum):
    OK = "ok"
    BREACH = "breach"
    NOT_EXERCISED = "not exercised"
    UNVERIFIED = "unverified"


class Verdict(NamedTuple):
    state: State
    text: str = ""


@dataclass(frozen=True)
class Result:
    """Of one case; `verdicts` in the order of the module's text."""

    case: str
    about: str
    state: State
    verdicts: Mapping[str, Verdict]
    report: Report


# -- verdicts ------------------------------------------------------------------------


def _outputs(found: Report, truth: Report) -> Verdict:
    for name, tokens in truth.tokens.items():
        if name.startswith("settles"):
            continue
        if name not in found.tokens:
            return Verdict(State.BREACH, f"{name} has not finished")
        if found.tokens[name] != tokens:
            return Verdict(State.BREACH, f"{name} has other tokens")
        pairs = zip(found.logprobs[name], truth.logprobs[name], strict=True)
        worst = max((abs(one - other) for one, other in pairs), default=0.0)
        if worst > MAX_DIFFERENCE:
            return Verdict(State.BREACH, f"{name}: logprobs differ by {worst:.3f}")
    return Verdict(State.OK)


def _exercised(found: Report) -> Verdict:
    if found.broken:
        return Verdict(State.BREACH, found.broken[0])
    for name, has_to in found.wanted.items():
        if not has_to and found.loads.get(name):
            text = f"{name} loaded {found.loads[name]} tokens; must load none"
            return Verdict(State.BREACH, text)
    idle = [name for name, has_to in found.wanted.items() if has_to]
    idle = [name for name in idle if not found.loads.get(name)]
    if idle or found.skipped:
        text = found.skipped or f"{idle[0]} loaded nothing"
        return Verdict(State.NOT_EXERCISED, text)
    return Verdict(State.OK, f"{sum(found.loads.values())} tokens")


def _bytes(found: Report) -> Verdict:
    if found.num_findings:
        text = f"{found.num_findings} findings: {found.findings[:1]}"
        return Verdict(State.BREACH, text)
    if not sum(found.loads.values()):
        return Verdict(State.NOT_EXERCISED, "nothing was loaded")
    text = f"{found.verified} of {found.verified + found.unverified} slots"
    is_verified = found.verified and not found.unverified
    return Verdict(State.OK if is_verified else State.UNVERIFIED, text)


def judge(case: Case, found: Report, truth: Report) -> Mapping[str, Verdict]:
    if found.died:
        nothing = Verdict(State.NOT_EXERCISED)
        others = dict.fromkeys(("outputs", "exercised", "bytes", "blocks"), nothing)
        return {"survives": Verdict(State.BREACH, found.died), **others}
    outputs, loaded = _outputs(found, truth), _bytes(found)
    if case.is_planted:
        outputs, loaded = _seen(outputs), _seen(loaded)
    freed = Verdict(State.OK)
    if found.unfreed:
        freed = Verdict(State.BREACH, f"{found.unfreed} blocks are not free")
    return {
        "survives": Verdict(State.OK),
        "outputs": outputs,
        "exercised": _exercised(found),
        "bytes": loaded,
        "blocks": freed,
    }


def _seen(verdict: Verdict) -> Verdict:
    """Of a planted fault: a breach is what is wanted."""
    if verdict.state is State.BREACH:
        return Verdict(State.OK, f"the fault shows: {verdict.text}")
    return Verdict(State.NOT_EXERCISED, f"the fault does not show {verdict.text}")


def conclude(case: Case, verdicts: Mapping[str, Verdict]) -> State:
    states = {name: verdict.state for name, verdict in verdicts.items()}
    if State.BREACH in states.values():
        return State.BREACH
    is_seen = State.OK in (states["outputs"], states["bytes"])
    if states["exercised"] is State.OK and (is_seen or not case.is_planted):
        return State.OK
    return State.NOT_EXERCISED


# -- engines -------------------------------------------------------------------------


def make_model(folder: Path, changes: Mapping[str, Any]) -> str:
    """A small model whose outputs depend on each token of its text."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**MODEL, "initializer_range": 0.15, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def make_adapter(folder: Path, number: int, model: str | Path, rank: int = 8) -> str:
    """A LoRA adapter with random weights for v_proj of a Llama, seeded by `number`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    settings["target_modules"] = ["v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    config = json.loads((Path(model) / "config.json").read_text())
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden_size // num_heads
    size = config["num_key_value_heads"] * head_dim
    draw = torch.Generator().manual_seed(number)
    sizes = {"A": (rank, hidden_size), "B": (size, rank)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_{part}.weight": (
            torch.randn(size, generator=draw)
        )
        for layer in range(config["num_hidden_layers"])
        for part, size in sizes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def _end_group(leader: int) -> None:
    """Waits for the end of a process, and ends what it has started: that may hold its
    pipes open for ever. Does not reap it, so that its number stays taken."""
    os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)
    os.killpg(leader, signal.SIGKILL)


def _ending(status: int, log: str) -> str:
    """How a process ended, and where if Python's faulthandler wrote it: it names the
    main thread last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    for line in lines:
        if line.startswith("Timeout ("):
            how = f"was ended: no answer within {line[9:-2]}"
    heads = [n for n, line in enumerate(lines) if line.endswith("call first):")]
    last = lines[heads[-1] + 1 :][:1] if heads else lines[-1:]
    return ": ".join([f"the engine's process {how}", *last])


def _messages(request: Request, is_quiet: bool) -> Iterator[dict[str, Any]]:
    """Those of one process; the last one says how it ended."""
    with ExitStack() as stack:
        ours, theirs = os.pipe()
        lines = stack.enter_context(os.fdopen(ours))
        log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        folder = tempfile.TemporaryDirectory(
            prefix="vllm-nwor-", ignore_cleanup_errors=True
        )
        command = [sys.executable, "-m", f"{__package__}.conformance_cases"]
        command += [str(theirs), json.dumps(asdict(request))]
        process = subprocess.Popen(
            [*command, stack.enter_context(folder)],
            pass_fds=(theirs,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log if is_quiet else None,
            stderr=log if is_quiet else None,
        )
        os.close(theirs)
        end = Thread(target=_end_group, args=(process.pid,))
        end.start()
        try:
            for line in lines:
                if line.endswith("\n"):  # or else it was killed while it wrote
                    yield json.loads(line)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            end.join()
            status = process.wait()
        log.seek(0)
        yield {"ended": _ending(status, log.read())}


def play(
    request: Request, say: Callable[[str], None], is_quiet: bool
) -> dict[str, Report]:
    """The report of each case of `request`. say: gets what is being done.

    Raises:
        WrongArgument: of the user's.
    """
    reports: dict[str, Report] = {}
    waiting = list(request.cases)
    who = request.connector or "no connector"
    while waiting:
        say(f"an engine with {who} starts")
        current = ""
        for message in _messages(replace(request, cases=tuple(waiting)), is_quiet):
            if text := message.get("wrong"):
                raise WrongArgument(text)
            if name := message.get("begins"):
                current = name
                say(f"{name}, with {who}")
            if name := message.get("case"):
                reports[name] = Report(**message["report"])
                waiting.remove(name)
            ended = message.get("ended", "")
            if current in waiting and ended:
                reports[current] = Report(died=ended)
                waiting.remove(current)
            if text := message.get("unstarted", "" if current else ended):
                died = f"{NO_START}: {text}"
                reports |= {name: Report(died=died) for name in waiting}
                waiting = []
    return reports


def prepare(
    engine: str, model: str | None, folder: Path, cases: Sequence[str]
) -> Request:
    """For an engine of ENGINES without a connector, and those of `cases` that it has to
    play. Makes what it needs in `folder`. model: as in `run`."""
    changes, arguments = ENGINES[engine]
    names = tuple(name for name in cases if CASES[name].engine == engine)
    path = model if model and not changes else make_model(folder / engine, changes)
    adapters: Sequence[str] = ()
    if "enable_lora" in arguments:
        adapters = [make_adapter(folder / str(n), n, path) for n in (1, 2)]
    return Request(names, None, {}, path, arguments, adapters)


def results(
    cases: Sequence[str], founds: Mapping[str, Report], truths: Mapping[str, Report]
) -> Iterator[Result]:
    """truths: of an engine without a connector."""
    for name in cases:
        case, found, truth = CASES[name], founds[name], truths[name]
        verdicts = judge(case, found, truth)
        if truth.died:
            text = f"without a connector: {truth.died}"
            verdicts = dict.fromkeys(verdicts, Verdict(State.NOT_EXERCISED, text))
        yield Result(name, case.about, conclude(case, verdicts), verdicts, found)


def run(
    connector: str,
    config: Mapping[str, Any],
    model: str | None,
    cases: Sequence[str],
    say: Callable[[str], None],
    is_quiet: bool = True,
) -> Iterator[Result]:
    """model: instead of the one made here, but for the sliding window.

    Raises:
        WrongArgument: the connector or the model cannot be had.
    """
    engines = {CASES[name].engine for name in cases}
    with tempfile.TemporaryDirectory(prefix="vllm-nwor-") as folder:
        for engine in [engine for engine in ENGINES if engine in engines]:
            alone = prepare(engine, model, Path(folder), cases)
            truths = play(replace(alone, checks=connector), say, is_quiet)
            died = truths[alone.cases[0]].died
            if model and engine == "base" and died.startswith(NO_START):
                raise WrongArgument(
                    f"--model is {model!r}: {died}; must be the folder of a Hugging "
                    "Face model that vLLM runs on a CPU, or the name of a cached one"
                )
            with_it = replace(alone, connector=connector, config=dict(config))
            yield from results(alone.cases, play(with_it, say, is_quiet), truths)
