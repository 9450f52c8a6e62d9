# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nwor.audit --selftest`: does the KV audit find what it says?

Exit status: 0 it does, 1 it does not, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_nwor.audit", description="The KV audit."
    )
    text = "plant faults in a real engine on the CPU, and look for the findings"
    parser.add_argument("--selftest", action="store_true", required=True, help=text)
    parser.parse_args()
    from . import selftest

    for name in [name for name in os.environ if name.startswith("VLLM_NWOR_")]:
        del os.environ[name]
    os.environ.update(selftest.VARIABLES)
    return 0 if selftest.run(partial(print, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
