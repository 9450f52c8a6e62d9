# SPDX-License-Identifier: Apache-2.0
"""The audit against a real vLLM engine on the CPU, with faults planted on purpose.

A small model with random weights, made here: nothing is downloaded. One engine, mode
cow, all bytes compared in each step. First a clean run, in which nothing may be found;
then one run for each of `faults`, in which the first finding of the class expected must
name the layer, the slot and the writer. With `states` the engine has recurrent states,
and the faults are those of state_faults.py.

It needs `VLLM_NWOR_*` and vLLM's own variables set before vLLM is imported, so that it
runs in a process of its own, which sets them (__main__.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .bench import Bench, prompt
from .faults import FAULTS
from .findings import Finding
from .state_faults import STATE_FAULTS, StateBench
from .state_faults import clean_run as state_clean_run


def clean_run(bench: Bench) -> list[Finding]:
    """Batches, chunked prefill, preemption, prefix hits, also in the step that writes
    them, aborts, names used again. What was found."""
    shared = prompt(9, 80)
    for number in range(30):
        tail = prompt(20 + number, 10 + 7 * (number % 9))
        bench.add(f"clean{number}", shared[: 20 * (number % 5)] + tail, 48)
        if number % 6 == 1:  # the same text in the same step
            bench.add(f"twin{number}", shared + prompt(1, 20), 120)
            bench.add(f"other{number}", shared + prompt(1, 20), 120)
        bench.step(9)
        if number % 5 == 4:
            bench.llm.abort_request([f"clean{number}"])
            bench.add(f"clean{number}", tail, 20)
    while bench.llm.has_unfinished_requests():
        bench.step()
    return list(bench.found)


def run(say: Callable[[str], None], ready: Callable[[], None], states: bool) -> bool:
    """Whether the audit is what it says it is; `say` gets a line for each check. ready:
    called once the engine has started. states: recurrent states, and nothing else."""
    bench = StateBench() if states else Bench()
    ready()
    found = (
        state_clean_run(bench) if isinstance(bench, StateBench) else clean_run(bench)
    )
    compared = bench.compared()
    passed = not found and min(compared.values()) > 0
    say(
        f"{'ok  ' if passed else 'FAIL'} clean run: {len(found)} findings in "
        f"{bench.num_steps} steps; "
        + ", ".join(f"{number} {what}" for what, number in compared.items())
    )
    faults = STATE_FAULTS if states else FAULTS
    num_found = sum(is_found(bench, of, wanted, say) for of, wanted in faults.items())
    passed = passed and num_found == len(faults)
    say(
        f"{bench.num_steps} steps; {'passed' if passed else 'FAILED'}: {num_found} of "
        f"{len(faults)} planted faults found"
    )
    if not states:
        say("recurrent states: not tried here, but by --selftest --states")
    return passed


def is_found(
    bench: Any, fault: Callable[[Any], Any], expected: Any, say: Callable[[str], None]
) -> bool:
    """Plants one fault."""
    bench.clear()
    bench.start()
    places = fault(bench)
    bench.step(5)
    bench.abort()
    of_class = [finding for finding in bench.found if finding.kind == expected.kind]
    is_right = bool(of_class) and expected.matches(of_class[0], places, bench.names)
    (text, *_) = (fault.__doc__ or "").splitlines()
    say(f"{'ok  ' if is_right else 'FAIL'} {fault.__name__}: {text}")
    if is_right:
        say(f"     {summary(of_class[0])}")
    else:
        others = [finding.line() for finding in bench.found][:4]
        say(f"     expected {expected} at {places}; found {others}")
    return is_right


def summary(finding: Finding) -> str:
    """What and where; the log has more."""
    names = ("layer", "state", "block", "slot", "position")
    where = ((name, getattr(finding, name)) for name in names)
    parts = [f"{name} {value}" for name, value in where if value is not None]
    if finding.writer.request is not None:
        parts.append(f"written by {finding.writer.request}")
    return f"{finding.kind}: {', '.join(parts)}; found in step {finding.step}"
