# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nwor.audit --selftest [--states]`: does the KV audit find planted
faults? `--connector MODULE:CLASS`: does a KV connector keep vLLM's contract?

Exit status: 0 all found, or conforming; 1 some missed, a breach, nothing exercised, or
an error; 2 wrong arguments.
VLLM_LOGGING_LEVEL=DEBUG shows vLLM's log, findings as they are logged, and tracebacks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LEVEL = "VLLM_LOGGING_LEVEL"
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_NWOR_MODE": "cow",
    "VLLM_NWOR_STRICT": "always",
    "VLLM_NWOR_AUDIT": "log",
    "VLLM_NWOR_AUDIT_MIB": "4096",
}
# Of the conformance kit: vLLM's own KV cache, and a failure of the audit is not one of
# the connector. With more threads the same text has other logprobs now and then.
KIT_VARIABLES = {
    "VLLM_NWOR_MODE": "off",
    "VLLM_NWOR_STRICT": "0",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # else it sets OpenMP's number
}


def show_errors() -> None:
    """Internal errors of the audit, by NWOR's logger, which vLLM resets when an engine
    starts. Findings are the self-test's to show."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler.addFilter(lambda record: bool(record.exc_info))
    logger = logging.getLogger("vllm.v1.nwor")
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r}; must be a JSON object: {{...}}")
    return found


def why_no_connector(name: str) -> str | None:
    """What is wrong with MODULE:CLASS, without importing MODULE: vLLM takes seconds. A
    name alone is one of vLLM's, or not."""
    module, colon, cls = name.rpartition(":")
    why = f"there is no module {module!r}"
    try:
        if not colon or (module and cls and find_spec(module)):
            return None
    except Exception as error:  # of a package that has the module
        why = f"{type(error).__name__}: {error}"
    if not (module and cls):
        why = "a part is empty"
    return (
        f"--connector is {name!r}: {why}; must be MODULE:CLASS, a class of vLLM's "
        f"KVConnectorBase_V1 in a module that Python finds from {os.getcwd()}"
    )


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_nwor.audit",
        description="The KV audit.",
        epilog="`explain FILE [--html OUT]` tells an incident file in words.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    text = "plant faults in a real engine on the CPU, and look for the findings"
    what.add_argument("--selftest", action="store_true", help=text)
    text = "run the conformance kit: a class of a module, or the name of vLLM's own"
    what.add_argument("--connector", metavar="MODULE:CLASS", help=text)
    text = "--selftest: faults of recurrent states instead, in an engine that has some"
    parser.add_argument("--states", action="store_true", help=text)
    kit = parser.add_argument_group("with --connector")
    text = "kv_connector_extra_config; {folder} becomes an empty folder of each engine"
    kit.add_argument("--config", type=json_object, metavar="JSON", help=text)
    text = "folder or cached name of a model, for all cases but sliding_window"
    kit.add_argument("--model", help=text)
    text = "a case; may be repeated; default: all"
    kit.add_argument("--case", action="append", metavar="NAME", help=text)
    kit.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    kit.add_argument("--json", metavar="FILE", help="write JSON")
    args = parser.parse_args()
    for name in ("config", "model", "case", "junit", "json"):
        if getattr(args, name) is not None and not args.connector:
            parser.error(f"--{name} needs --connector")
    if args.states and not args.selftest:
        parser.error("--states needs --selftest")
    if args.connector and (why := why_no_connector(args.connector)):
        parser.error(why)
    for name in ("junit", "json"):
        path = getattr(args, name)
        if path and not Path(path).resolve().parent.is_dir():
            parser.error(f"--{name} is {path!r}; its folder must exist")
    return parser, args


def run_kit(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from .conformance import CASES, WrongArgument
    from .conformance_report import conformance

    for name in args.case or ():
        if name not in CASES:
            parser.error(f"--case is {name!r}; must be one of {', '.join(CASES)}")
    args.config = args.config or {}
    try:
        return conformance(args, os.environ.get(LEVEL, "").upper() != "DEBUG")
    except WrongArgument as error:
        parser.error(str(error))


def main() -> int:
    parser, args = parse()
    for name in [name for name in os.environ if name.startswith("VLLM_NWOR_")]:
        del os.environ[name]
    if args.connector:
        os.environ.update(VARIABLES | KIT_VARIABLES)
        return run_kit(parser, args)
    # vLLM logs errors with a traceback and goes on: a cache on a disk that it cannot
    # write, for one.
    is_quiet = os.environ.get(LEVEL, "").upper() != "DEBUG"
    os.environ.update(VARIABLES | ({LEVEL: "CRITICAL"} if is_quiet else {}))
    say = partial(print, flush=True)
    try:
        # It imports vLLM, which reads its variables then.
        from . import selftest

        ready = show_errors if is_quiet else lambda: None
        return 0 if selftest.run(say, ready, args.states) else 1
    except Exception as error:
        if not is_quiet:
            raise
        say(f"FAIL the self-test ended with {type(error).__name__}: {error}")
        say(f"     {LEVEL}=DEBUG shows where that comes from")
        return 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["explain"]:
        from .explain import main as explain

        sys.exit(explain(sys.argv[2:]))
    sys.exit(main())
