# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector between two instances on this CPU: what the decode one reads is
compared with the digests that came along; and between two servers, as connectors.md
starts them. NIXL: `make frameworks`. On a GPU: tests/gpu/test_offloading.py.

    python -m tests.e2e.test_nixl prefill|decode FOLDER NUM_RANKS    # in the test
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from benchmarks.files import write_json

from tests.gpu.rows import prompt
from tests.helpers.environment import REPO, subprocess_env
from tests.helpers.player import Outputs, Request
from tests.helpers.server import ARGUMENTS, Server, serve

INSTALLED = REPO / ".venv-frameworks"
BLOCK_SIZE = 32
LENGTH = 3 * BLOCK_SIZE + 5
LIMIT_S = 500
ALL = {"verified": LENGTH - 1, "handover_verified": 1}
# What the decode instance finds, of each case: counts, and (layer, position).
EXPECTED: dict[str, tuple[dict[str, int], list[tuple[int | None, int]]]] = {
    "clean": (ALL, []),
    "bit": ({"verified": 68, "not_as_sent": 1, "handover_wrong": 1}, [(2, 32)]),
    "tail": ({"verified": 96, "not_as_sent": 1, "handover_wrong": 1}, [(None, 98)]),
    "dropped": ({"unverified": LENGTH - 1, "handover_missing": 1}, []),
}

Run = Callable[[Request], Outputs]

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.fixture(autouse=True)
def nixl():
    if not any(distributions(name="nixl", path=[str(INSTALLED)])):
        pytest.skip("nixl is not installed: make frameworks")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_nixl_brings_is_compared(tmp_path, num_ranks):
    """Of two ranks the first one compares; bits are changed on both."""
    (tmp_path / "secret").write_text(32 * "s")
    with ExitStack() as stack:
        processes = []
        for number, role in enumerate(("prefill", "decode")):
            env = subprocess_env(
                PYTHONPATH=str(INSTALLED),
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                VLLM_NIXL_SIDE_CHANNEL_PORT=str(5711 + 10 * number),
            )
            command = [sys.executable, "-m", __name__, role, tmp_path, f"{num_ranks}"]
            process = subprocess.Popen(command, env=env, cwd=REPO, process_group=0)
            stack.enter_context(suppress(ProcessLookupError))  # it has ended
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
            processes.append(process)
        for process in reversed(processes):  # the prefill instance waits for the other
            assert process.wait(LIMIT_S) == 0
    found = json.loads((tmp_path / "found").read_text())
    assert found == json.loads(json.dumps(EXPECTED))


def test_between_two_servers(tmp_path):
    """The documented commands; the test does what a proxy has to, and with the second
    request what one does that copies only the keys it knows. The answers are those of
    the instance that computed the texts."""
    commands = [
        shlex.split(line)
        for line in (REPO / "docs" / "connectors.md").read_text().splitlines()
        if line.startswith("    vllm serve MODEL") and "NixlConnector" in line
    ]
    secret = tmp_path / "secret"
    secret.write_text(32 * "s")
    with ExitStack() as stack:
        servers = []
        for number, command in enumerate(commands):
            (folder := tmp_path / str(number)).mkdir()
            transfer = json.loads(command[-1]) | {"kv_buffer_device": "cpu"}
            assert command[-2] == "--kv-transfer-config"
            arguments = [*ARGUMENTS, command[-2], json.dumps(transfer)]
            server = serve(
                folder,
                "stage" if number else "off",
                "smollm2-135m",
                *arguments,
                PYTHONPATH=str(INSTALLED),
                VLLM_NIXL_SIDE_CHANNEL_PORT=str(5713 + number),
                VLLM_NWOR_AUDIT="log",
                VLLM_NWOR_AUDIT_SECRET=str(secret),
            )
            servers.append(stack.enter_context(server))
        prefilling, decoding = servers
        for result in ("verified", "missing"):
            text = f"{result}: " + 12 * "the cat sat on the mat, the dog sat down, "
            first = prefilling.complete(text, 1, kv_transfer_params=REMOTE)
            params = first["kv_transfer_params"]
            if result == "missing":
                del params["nwor"]
            answer = decoding.complete(text, 40, kv_transfer_params=params)
            assert answer["choices"] == prefilling.complete(text, 40)["choices"]
            assert handovers(decoding)[result] == 1
        assert sum(handovers(decoding).values()) == 2
        totals = decoding.idle_metrics()
    assert totals["vllm:nwor_audit_verified"] > 0


REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}


def handovers(server: Server) -> Counter[str]:
    name = "vllm:nwor_audit_handovers_total"
    found = (sample for sample in server.samples() if sample.name == name)
    return Counter({sample.labels["result"]: sample.value for sample in found})


# --- the two processes ----------------------------------------------------------------


def awaited(path: Path) -> str:
    until = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no {path} after {LIMIT_S} s")
        time.sleep(0.05)
    return path.read_text()


def ask(run: Run, name: str, seed: int, number: int, params: Any = None) -> Any:
    more = {"extra_args": {"kv_transfer_params": params}} if params else {}
    return run(Request(name, prompt(seed, LENGTH), number, params=more))


def prefill(rpc: Callable[..., Any], run: Run, folder: Path) -> None:
    """Bits are changed when the digests were taken, before the blocks are read. run:
    plays one request on the engine; rpc: calls a method of its workers."""
    awaited(folder / "ready")
    for seed, case in enumerate(EXPECTED):
        result = ask(run, case, seed, 1, {"do_remote_decode": True})
        params = result.transfer_params[case]
        (ids,) = params["remote_block_ids"]
        if case == "dropped":
            del params["nwor"]
        elif case in ("bit", "tail"):
            block, slot = (1, 9) if case == "bit" else (3, 2)
            rpc("test_flip_slot", 2, ids[block] * BLOCK_SIZE + slot)
        write_json(folder / case, params)
    awaited(folder / "found")


def decode(rpc: Callable[..., Any], run: Run, folder: Path) -> None:
    # vLLM's attention on CPUs fails (SIGILL with AMX) if a decode is the first step.
    ask(run, "first", 99, 2)
    (folder / "ready").touch()
    found = {}
    for seed, case in enumerate(EXPECTED):
        params = json.loads(awaited(folder / case))
        before = rpc("test_audit")[0]
        ask(run, case, seed, 4, params)
        look, *others = rpc("test_audit")
        assert not any(of["findings"] for of in others), "compared by the first rank"
        rise = {n: k - before["counts"].get(n, 0) for n, k in look["counts"].items()}
        places = [
            (one["layer"] and int(one["layer"].split(".")[2]), one["position"])
            for one in look["findings"][len(before["findings"]) :]
        ]
        found[case] = {n: k for n, k in rise.items() if k and n != "steps"}, places
    write_json(folder / "found", found)


def main(role: str, folder: Path, num_ranks: int) -> None:
    from tests.helpers.engine import Engine
    from tests.integration.test_byte_oracle import EVERYTHING

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # for worker processes
    engine = Engine(
        "off",
        EVERYTHING | {"AUDIT_SECRET": str(folder / "secret")},
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        },
        enable_prefix_caching=True,
        speculative_config=None,
        max_num_batched_tokens=64,
        worker_extension_cls="tests.gpu.worker.GpuTestExtension",
        tensor_parallel_size=num_ranks,
        distributed_executor_backend="mp" if num_ranks > 1 else None,
    )
    part = {"prefill": prefill, "decode": decode}[role]
    call = engine.llm.collective_rpc
    part(lambda name, *of: call(name, args=of), lambda one: engine.run([one]), folder)
    os._exit(0)  # NIXL's threads outlive the engine, and the test ends its workers


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
