# SPDX-License-Identifier: Apache-2.0
"""The engines of the GPU tests (engines.yml), and their EngineArgs and environment.

MATRIX covers every pair of values of the five factors that vLLM 0.26 allows together
(`uncovered_pairs`, checked by a unit test). Why some pairs are IMPOSSIBLE:

    ngram is synchronous only; per-token-head caches are TRITON_ATTN's only;
    a draft model with an MLA target would mix two kinds of cache in one group;
    the V2 runner's drafter is an EAGLE head, or MTP layers where the target is MLA.

Imports neither torch nor vLLM.
"""

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.environment import model_path

_READ = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text("utf-8"))
# Environment variables and EngineArgs of every engine; of each drafter its model runner
# and its part of speculative_config.
ENVIRONMENT: dict[str, str] = _READ.pop("environment")
ARGUMENTS: dict[str, Any] = _READ.pop("arguments")
DRAFTERS: dict[str, dict[str, Any]] = _READ.pop("drafters")
CONNECTORS: dict[str, Any] = _READ.pop("connectors")

# How often each draft position is accepted, for the first k of them.
RATES = (0.8, 0.6, 0.4, 0.25, 0.15, 0.1, 0.05)
MAX_NUM_SEQS: int = ARGUMENTS["max_num_seqs"]
MAX_NUM_BATCHED_TOKENS: int = ARGUMENTS["max_num_batched_tokens"]
GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MLA_BACKENDS = ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "CPU_MLA")
# Requests in a step, from and to, and how many drafts each has then.
DYNAMIC = [[1, 4, 4], [5, 16, 2], [17, MAX_NUM_SEQS, 1]]


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    drafter: a key of DRAFTERS, or "" for none; it decides the model runner, unless
    `runs_on` does. backend: attention backend. graphs: vLLM's cudagraph_mode, or EAGER.
    kv_cache: vLLM's kv_cache_dtype, "auto" for bf16. num_blocks: KV blocks,
    deliberately few. kv_layout: NHD or HND by VLLM_KV_CACHE_LAYOUT. connector: a key of
    CONNECTORS, or "" for none. loras: number of random LoRA adapters. rejection: vLLM's
    rejection_sample_method; with any other than synthetic, drafters get the target's
    weights, so that some of their drafts are right. adaptive: vLLM decides on the
    device how many drafts it verifies. dynamic: DYNAMIC drafts. flash: FlashAttention's
    version, if not vLLM's choice (3 on Hopper). executor: "" for vLLM's own, "ray", or
    "ray-compiled" (up to 0.32). windows: some layers have a sliding window, and a
    KV-cache group of their own. hybrid: its folder, if some layers have recurrent
    state. cached: which is found in the prefix cache (vLLM 0.29 on). state_dtype:
    vLLM's mamba_ssm_cache_dtype. steps: at how many the audit looks at least, without a
    finding. seats: in mode stage, how many requests have shadow blocks; 0 for all.
    real: with the weights of SmolLM2, by tools/setup/make_models.py, and prompts of
    benchmarks/prompts.json.
    """

    name: str
    drafter: str
    backend: str
    graphs: str
    asynchronous: bool
    kv_cache: str = "auto"
    num_drafts: int = 4
    block_size: int = 16
    num_blocks: int = 256
    kv_layout: str | None = None
    tensor_parallel: int = 1
    connector: str = ""
    loras: int = 0
    rejection: str = "synthetic"
    adaptive: bool = False
    dynamic: bool = False
    executor: str = ""
    runs_on: str = ""
    windows: bool = False
    hybrid: str = ""
    cached: bool = False
    state_dtype: str = "auto"
    steps: int = 0
    seats: int = 0
    flash: int = 0
    real: bool = False

    @property
    def runner(self) -> str:
        return self.runs_on or str(DRAFTERS[self.drafter]["runner"])

    @property
    def is_mla(self) -> bool:
        return self.backend in MLA_BACKENDS

    @property
    def model(self) -> str:
        """The target's folder of models.yml."""
        if self.real:
            return "smollm2-135m"
        if self.hybrid:
            return self.hybrid
        return "mla" if self.is_mla else "gemma3" if self.windows else "llama"

    @property
    def num_groups(self) -> int:
        return 1 + self.windows

    @property
    def trims_drafts(self) -> bool:
        """Whether the worker may run fewer drafts than vLLM counts."""
        return self.adaptive or (self.drafter == "ngram_gpu" and self.runner == "v1")

    @property
    def num_slots(self) -> int:
        """Slots that requests can use: block 0 is vLLM's null block."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_shadow_blocks(self) -> int:
        """In mode stage: shadow blocks for `seats` requests, in addition to the
        scheduler's blocks."""
        if os.environ.get("VLLM_NWOR_MODE") != "stage":
            return 0
        of_one = 1 - -(self.num_drafts - 1) // self.block_size
        return (self.seats or MAX_NUM_SEQS) * of_one * self.num_groups

    @property
    def factors(self) -> tuple[frozenset[str], ...]:
        """The row's value of each factor; the default graph mode counts as two."""
        cache = "bf16" if self.kv_cache == "auto" else self.kv_cache
        return (
            frozenset({"head" if self.runner == "v2" else self.drafter}),
            frozenset({"MLA" if self.is_mla else self.backend}),
            frozenset(self.graphs.split("_AND_")),
            frozenset({"per_token_head" if "per_token_head" in cache else cache}),
            frozenset({"async" if self.asynchronous else "sync"}),
        )

    def environment(self) -> dict[str, str]:
        """vLLM's environment variables for this engine."""
        found = {"VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner == "v2" else "0"}
        if self.kv_layout is not None:
            found["VLLM_KV_CACHE_LAYOUT"] = self.kv_layout
        if self.executor:
            is_new = self.executor == "ray"
            found["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "1" if is_new else "0"
        return found

    def store(self, models: Path) -> Path:
        """The folder of an ExampleConnector."""
        return models.with_name(f"{self.name}-store")

    def arguments(self, models: Path) -> dict[str, Any]:
        """Keyword arguments of vLLM's EngineArgs. models: see tests.gpu.models."""
        store = self.store(models)
        if self.real:
            models = Path(model_path(self.model)).parent
        arguments = ARGUMENTS | {
            "model": str(models / self.model),
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_blocks + self.num_shadow_blocks,
            "kv_cache_dtype": self.kv_cache,
            "attention_backend": self.backend,
            "async_scheduling": self.asynchronous,
            "tensor_parallel_size": self.tensor_parallel,
            "speculative_config": self._speculation(models) if self.drafter else None,
        }
        if self.hybrid:
            # The prefill kernel that needs no FlashInfer; vLLM chooses the block size.
            arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
            arguments |= {"enable_prefix_caching": self.cached, "block_size": None}
            arguments["mamba_ssm_cache_dtype"] = self.state_dtype
        if self.cached:  # at each block end that is computed; blocks are large
            arguments |= {"prefix_cache_retention_interval": None}
            arguments |= {"max_model_len": 2048}
        if self.real:
            arguments["load_format"] = "auto"
        if self.flash:
            arguments["attention_config"] = {"flash_attn_version": self.flash}
        if self.executor:
            arguments["distributed_executor_backend"] = "ray"
        if self.connector:
            text = json.dumps(CONNECTORS[self.connector]).replace("STORE", str(store))
            arguments["kv_transfer_config"] = json.loads(text)
        if self.graphs == "EAGER":
            return arguments | {"enforce_eager": True}
        sizes = [batch * (1 + self.num_drafts) for batch in GRAPH_BATCHES]
        compilation: dict[str, Any] = {
            "cudagraph_mode": self.graphs,
            "cudagraph_capture_sizes": sizes,
        }
        if "PIECEWISE" not in self.graphs:
            compilation["mode"] = 0  # nothing is compiled: starts in seconds
        return arguments | {"compilation_config": compilation}

    def _speculation(self, models: Path) -> dict[str, Any]:
        config: dict[str, Any] = {
            "method": self.drafter,
            "num_speculative_tokens": self.num_drafts,
            "rejection_sample_method": self.rejection,
        }
        if self.rejection == "synthetic":
            rates = [RATES[min(i, len(RATES) - 1)] for i in range(self.num_drafts)]
            config["synthetic_acceptance_rates"] = rates
        elif self.rejection == "fly":
            # One right draft always excuses the wrong one before it.
            config |= {"fly_window_size": 1, "fly_entropy_threshold": 0.0}
        if self.adaptive:
            config["enable_adaptive_verification"] = True
        if self.dynamic:
            config["num_speculative_tokens_per_batch_size"] = DYNAMIC
        for name, value in DRAFTERS[self.drafter].items():
            if name == "model":
                folder = "smollm2-draft-26" if self.real else value
                config["model"] = str(models / folder)
            elif name == "attention_backend":
                config["attention_backend"] = self.backend
            elif name != "runner":
                config[name] = value
        return config


GROUPS = {
    group: tuple(
        EngineSpec(name, asynchronous=name.endswith("-async"), **all_have | fields)
        for all_have in [engines.pop("all", {})]
        for name, fields in engines.items()
    )
    for group, engines in _READ.items()
    if isinstance(engines, dict)
}
BY_NAME = {spec.name: spec for group in GROUPS.values() for spec in group}
GROUPS["poisoned"] = tuple(BY_NAME[name] for name in _READ["poisoned"])
MATRIX = GROUPS["matrix"]

FACTORS = (
    ("ngram", "draft_model", "head"),
    ("FLASH_ATTN", "TRITON_ATTN", "MLA"),
    ("FULL", "PIECEWISE", "EAGER"),
    ("bf16", "fp8", "per_token_head"),
    ("async", "sync"),
)
# Not allowed by vLLM 0.26, or not run by this project.
IMPOSSIBLE = {
    ("ngram", "async"),
    ("FLASH_ATTN", "per_token_head"),
    ("MLA", "per_token_head"),
    ("draft_model", "MLA"),
}


def uncovered_pairs() -> set[tuple[str, str]]:
    """Possible pairs of values of two factors that no engine has."""
    there = (values for spec in MATRIX for values in itertools.product(*spec.factors))
    wanted, found = (
        {pair for values in some for pair in itertools.combinations(values, 2)}
        for some in (itertools.product(*FACTORS), there)
    )
    return wanted - found - IMPOSSIBLE
