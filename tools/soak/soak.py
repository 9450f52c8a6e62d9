#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves a mixed load for minutes with NWOR on, and says whether all is well after it.

    python tools/soak/soak.py --model PATH --minutes 10 --json results/soak.jsonl \\
        --speculative-config '{...}' --serve-args '--enforce-eager'

starts `vllm serve` with several API servers; `--url`, `--pid` and `--log` name one that
runs on this machine. The load is described in load.py, the checks in checks.py: outputs
of a probe identical from start to end, the identities of the counters, KV blocks free,
memory flat, no fallback, no breach, no error in the log. All that was found is appended
to the file of --json, with the verdicts.

Needs only packages that come with vLLM. Exit status: 0 no check failed; 1 one did, or
the server does not start; 2 a bad argument.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from benchmarks import environment, records  # noqa: E402
from benchmarks.arguments import positive, whole  # noqa: E402

from tools.soak import checks  # noqa: E402
from tools.soak import server as soak_server  # noqa: E402
from tools.soak.load import WEIGHTS, Load  # noqa: E402

PROGRAM = "tools/soak/soak.py"
START_SECONDS, SETTLE_SECONDS = 600.0, 60.0
# How long the load goes on for the audit's sake: at a time, and at most.
EXTENSION_SECONDS, MOST_LENGTHS = 30.0, 4
AUDITED_STEPS = "vllm:nwor_audit_steps"
# Paths and addresses of the machine.
NOT_RECORDED = ("model", "url", "pid", "log", "json")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Exits with status 2 if it cannot be used."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count, above_0 = whole(1), positive(1e6)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", help="folder of the model to serve")
    where.add_argument("--url", help="of a server that runs, http://127.0.0.1:PORT")
    add = parser.add_argument
    add("--pid", type=int, help="its main process (with --url)")
    add("--log", type=Path, help="the server's output: read (with --url) or written")
    modes = ("stage", "cow", "off")
    add("--mode", choices=modes, default="stage", help="VLLM_NWOR_MODE; off: control")
    add("--serve-args", default="", help="more arguments for vllm serve, in one word")
    text = "NAME=VALUE for the server started here; may be given several times"
    add("--env", action="append", default=[], help=text)
    add("--speculative-config", help="JSON for vllm serve, as it takes it")
    add("--api-server-count", type=count, default=2, help="API servers")
    add("--minutes", type=above_0, default=10, help="length of the load")
    text = "extend the load until the KV audit has checked so many, up to 4 times"
    add("--audited-steps", type=whole(0), default=0, help=text)
    add("--concurrency", type=count, default=12, help="requests at a time")
    add("--seed", type=int, default=0, help="of the load")
    text = "send token ids below it, for a server without a tokenizer"
    add("--vocab-size", type=whole(2), help=text)
    text = "a kind of request that is not made"
    add("--without", choices=sorted(WEIGHTS), help=text)
    text = "the fixed request: during the load, or in pauses of it"
    add("--probe", choices=("loaded", "quiet"), default="loaded", help=text)
    add("--probe-seconds", type=above_0, default=5, help="between two probes")
    add("--sample-seconds", type=above_0, default=5, help="between memory samples")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="for the record")
    add("--json", type=Path, help="file to append what was found to")
    args = parser.parse_args(argv)
    known = [one is not None for one in (args.url, args.pid, args.log)]
    if any(known[:2]) and not all(known):
        parser.error("--url, --pid and --log go together")
    if bad := [setting for setting in args.env if "=" not in setting[1:]]:
        parser.error(f"--env {bad[0]!r}; must be NAME=VALUE")
    return args


@contextlib.contextmanager
def target(args: argparse.Namespace) -> Iterator[tuple[str, psutil.Process, Path]]:
    """Address, main process and log of the server of the command line: the one that
    runs, or one started here. Raises soak_server.ServerError if there is none."""
    if args.url is not None:
        try:
            yield args.url.rstrip("/"), psutil.Process(args.pid), args.log
        except psutil.NoSuchProcess as error:
            raise soak_server.ServerError(f"--pid: {error}") from error
        return
    port, command = soak_server.free_port(), [*soak_server.SERVE, args.model]
    command += ["--api-server-count", str(args.api_server_count)]
    if args.speculative_config is not None:
        command += ["--speculative-config", args.speculative_config]
    command += shlex.split(args.serve_args)
    changes = dict(setting.split("=", 1) for setting in args.env)
    env = os.environ | changes | {"VLLM_NWOR_MODE": args.mode}
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "server.log"
        with soak_server.serving(command, port, env, log, START_SECONDS) as root:
            yield f"http://127.0.0.1:{port}", psutil.Process(root.pid), log


async def drive(
    load: Load, args: argparse.Namespace, url: str, processes: soak_server.Processes
) -> None:
    """Runs the load, and samples the server's processes meanwhile; longer, while the
    audit has looked at fewer steps than asked for."""
    seconds, pause = args.minutes * 60, args.sample_seconds
    latest = time.monotonic() + MOST_LENGTHS * seconds

    async def watch() -> None:
        while True:
            processes.sample()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if not args.audited_steps or not load.deadline - 2 * pause < now < latest:
                continue
            found = await asyncio.to_thread(soak_server.read_metrics, url)
            if found["metrics"].get(AUDITED_STEPS, 0) < args.audited_steps:
                load.deadline = now + 2 * pause + EXTENSION_SECONDS

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        await load.run(seconds)
        watching.cancel()
    processes.sample()


def soak(
    args: argparse.Namespace, url: str, root: psutil.Process, log: Path
) -> dict[str, Any]:
    """Loads the server and returns what was found, without verdicts."""
    model, max_model_len = soak_server.model_of(url)
    processes = soak_server.Processes(root, int(url.rpartition(":")[2]))
    load = Load(url, model, max_model_len, args)
    started = time.monotonic()
    asyncio.run(drive(load, args, url, processes))
    seconds = time.monotonic() - started
    answers = soak_server.answers(f"{url}/health")
    prompt = "one two" if args.vocab_size is None else [1, 1]
    final = soak_server.settle(url, model, prompt, SETTLE_SECONDS)
    return {
        "model": Path(model).name,
        "load": {
            "seconds": round(seconds, 1),
            "kinds": dict(sorted(load.kinds.items())),
            **{"num_failed": load.num_failed, "failures": load.failures},
        },
        "probe": {"policy": args.probe, "kinds": load.probes},
        "alive": {"answers": answers, "ended": processes.ended},
        "clients": processes.clients,
        "memory": {"seconds": processes.seconds, "rss_mib": processes.rss_mib},
        "log": {"errors": soak_server.errors_in(log.read_text(errors="replace"))},
        **final,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    warnings = environment.warnings(args.device)
    try:
        with target(args) as server:
            print(f"{PROGRAM}: {args.minutes:g} minutes of load", file=sys.stderr)
            found = soak(args, *server)
    except soak_server.ServerError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    about = environment.describe(args.device, ROOT)
    about["variables"]["VLLM_NWOR_MODE"] = args.mode
    key = {"model": found["model"], "device": args.device, "vllm": records.vllm(about)}
    key |= {"mode": args.mode, "audited": AUDITED_STEPS in found["metrics"]}
    record: dict[str, Any] = {
        "key": key,
        **about,
        "command": shlex.join(["python", PROGRAM, *argv]),
        "warnings": warnings,
        "arguments": {k: v for k, v in vars(args).items() if k not in NOT_RECORDED},
        **found,
    }
    record["checks"] = checks.judge(record)
    record["passed"] = all(row["verdict"] != checks.FAIL for row in record["checks"])
    print(f"soak of {record['load']['seconds']:.0f} s")
    for row in record["checks"]:
        print("  {verdict:10}  {name}: {found} (wanted: {wanted})".format(**row))
    if args.json is not None:
        records.append(args.json, record)
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    # A plain kill must not leave the server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
