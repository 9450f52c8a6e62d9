# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nwor.audit explain FILE [--html OUT]`: an incident file in words, and
the history of the blocks that its findings name. It needs neither vLLM nor a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .findings import write_whole
from .incident import Incident, Report, read
from .incident_cases import cases
from .incident_page import page


def head(path: Path, incident: Incident, report: Report) -> list[str]:
    engine, steps = incident.engine, incident.steps
    span = f"steps {steps[0].step} to {steps[-1].step}" if steps else "no steps"
    return [
        f"{path}: {report.num_findings} findings; written {incident.written} "
        f"({incident.why})",
        f"vLLM {report.vllm}, vllm-nwor {report.nwor}, torch {report.torch}; mode "
        f"{engine.mode}, audit {report.audit}; model {engine.model}; KV connector "
        f"{engine.connector or 'none'}",
        f"It has {span}; the audit has looked at {report.steps} in all. The first "
        "finding is the one to look at; later ones often follow from it.",
    ]


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 1 if a file cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_nwor.audit explain", description="Explain an incident."
    )
    text = "what VLLM_NWOR_AUDIT_INCIDENT has named"
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    text = "also draw the history of each block, on a page without scripts"
    parser.add_argument("--html", type=Path, metavar="OUT", help=text)
    args = parser.parse_args(arguments)
    try:
        incident, report = read(args.file)
    except ValueError as error:
        print(error)
        return 1
    lines, found = head(args.file, incident, report), cases(incident, report)
    print("\n".join(lines))
    for number, case in enumerate(found, 1):
        print(f"\n{number}. {case.title()}")
        print("\n".join(f"   {line}" for line in case.lines()))
    if args.html:
        try:
            write_whole(args.html, page(lines, found).encode())
        except OSError as error:
            print(f"{args.html} cannot be written: {error.strerror}")
            return 1
        print(f"\nDrawn: {args.html}")
    return 0
