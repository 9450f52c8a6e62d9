# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nwor.audit --selftest [--states]`: does the KV audit find planted
faults?

Exit status: 0 all found, 1 some missed or an error, 2 wrong arguments.
VLLM_LOGGING_LEVEL=DEBUG shows vLLM's log and tracebacks.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from functools import partial

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


def show_findings() -> None:
    """The lines of NWOR's logger. vLLM resets it when an engine starts."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("vllm.v1.nwor")
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_nwor.audit", description="The KV audit."
    )
    text = "plant faults in a real engine on the CPU, and look for the findings"
    parser.add_argument("--selftest", action="store_true", required=True, help=text)
    text = "plant faults of recurrent states instead, in an engine that has some"
    parser.add_argument("--states", action="store_true", help=text)
    args = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("VLLM_NWOR_")]:
        del os.environ[name]
    is_quiet = os.environ.get(LEVEL, "").upper() != "DEBUG"
    # vLLM logs errors with a traceback and goes on: a cache on a disk that it cannot
    # write, for one.
    os.environ.update(VARIABLES | ({LEVEL: "CRITICAL"} if is_quiet else {}))
    say = partial(print, flush=True)
    try:
        # It imports vLLM, which reads its variables then.
        from . import selftest

        ready = show_findings if is_quiet else lambda: None
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
