# SPDX-License-Identifier: Apache-2.0
"""What speculative steps leave in the KV cache, without NWOR and with it: a picture.

    python -m benchmarks.picture   appends to results/picture.jsonl, draws the picture

One greedy request on real vLLM, on the CPU, with ngram drafts, twice in one engine:
with NWOR (mode stage), then with all of its hooks taken off. The caches are zeroed
before each run. Drafts and acceptance are those of vLLM's scheduler; what became of a
slot is read from the bytes of all layers, before and after each step. Which bytes are a
slot's is NWOR's layout, found by writing through vLLM's own writer (layout/probe.py).
"""

import io
from pathlib import Path
from typing import Any

from benchmarks import environment, prompts, records, settings
from benchmarks.arguments import parse
from benchmarks.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
# Which of prompts.json; which steps after the prompt's own; slots before their first.
PROMPT, STEPS, NUM_SLOTS_BEFORE = 1, range(9, 21), 3
# A slot after a step, as the file has it, with its color and meaning.
SLOT_STATES = {
    ".": ("#ffffff", "nothing written"),
    "c": ("#cddcec", "committed before"),
    "a": ("#1f6fb4", "committed in this step"),
    "x": ("#d55e00", "rejected in this step: bytes changed"),
    "d": ("#f3c5a3", "left behind by an earlier step"),
    "o": ("#56c7a5", "rejected in this step: bytes as before"),
}
_TITLES = {
    "vllm": "vLLM: keys and values of rejected drafts stay in the cache",
    "nwor": "vLLM with NWOR: slots of rejected drafts are as before the step",
}
# Of each layer its cache, and the places in a block of each slot's bytes.
Layers = list[tuple[Any, Any]]


def read(layers: Layers) -> Any:
    """[num_blocks, slots of a block, bytes of a slot in all layers] uint8."""
    import torch

    parts = [cache.view(torch.uint8).flatten(1)[:, own] for cache, own in layers]
    return torch.cat(parts, dim=2)


def play(engine: Any, layers: Layers, prompt: list[int]) -> dict[str, Any]:
    """Runs the prompt up to the last of STEPS, then aborts it.

    Returns tokens; first_slot; steps: [drafts, accepted] of each; slots: the states
    (SLOT_STATES) of first_slot and those behind it after each step.
    """
    from vllm import SamplingParams

    for cache, _ in layers:
        cache.zero_()
    sampling = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    engine.add_request("picture", {"prompt_token_ids": prompt}, sampling)
    scheduler = engine.engine_core.engine_core.scheduler
    (request,) = scheduler.requests.values()
    for _ in range(STEPS.start):
        engine.step()
    first, steps, slots = request.num_tokens - 1 - NUM_SLOTS_BEFORE, [], []
    for _ in STEPS:
        known, drafts = request.num_tokens, len(request.spec_token_ids)
        before = read(layers)
        engine.step()
        accepted = request.num_tokens - known - 1
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        after, before = (each[blocks].flatten(0, 1) for each in (read(layers), before))
        differs = (after != before).any(1)
        found = ["d" if one else "." for one in after.any(1)]
        found[: known - 1] = "c" * (known - 1)
        found[known - 1 : known + accepted] = "a" * (1 + accepted)
        for slot in range(known + accepted, known + drafts):
            found[slot] = "x" if differs[slot] else "o"
        steps.append([drafts, accepted])
        slots.append("".join(found[first:]).rstrip("."))
    engine.abort_request(["picture"])
    engine.step()
    slots = [row.ljust(max(map(len, slots)), ".") for row in slots]
    tokens = list(request.output_token_ids)
    return {"tokens": tokens, "first_slot": first, "steps": steps, "slots": slots}


def drawn(result: dict[str, Any]) -> bytes:
    """The picture of slots over steps, a PNG."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colors = ListedColormap([color for color, _ in SLOT_STATES.values()])
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 1), _TITLES.items(), strict=True):
        run = result["runs"][name]
        cells = [[list(SLOT_STATES).index(one) for one in row] for row in run["slots"]]
        steps = range(result["first_step"], result["first_step"] + len(cells))
        slots = range(run["first_slot"], run["first_slot"] + len(cells[0]))
        grid = {"edgecolors": "#e4e4e4", "linewidth": 0.6}
        axes.pcolormesh(slots, steps, cells, cmap=colors, vmin=0, vmax=5, **grid)
        axes.invert_yaxis()
        axes.set_yticks(steps, [str(step) for step in steps], fontsize=7)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel("step")
    axes.set_xlabel("slot of the request in the KV cache")
    shown = [
        Patch(fc=one, ec="#b0b0b0", label=what) for one, what in SLOT_STATES.values()
    ]
    figure.legend(handles=shown, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(picture := io.BytesIO(), format="png", dpi=110)
    return picture.getvalue()


def main() -> None:
    """Runs, writes and draws; raises if the two runs' outputs differ."""
    options = parse(["--batch-size", "1"])
    settings.prepare_process(options, "cpu")
    import torch
    from vllm import EngineArgs, LLMEngine

    from vllm_nwor.base import wrap as _wrap

    target, drafter = settings.find_models(options)
    arguments = settings.engine_arguments(options, "cpu", target, drafter)
    arguments |= {"num_gpu_blocks_override": 40, "max_model_len": 512, "block_size": 32}
    engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    manager = worker.model_runner.nwor_state.named("transaction").manager
    layers: Layers = []
    for layer in (layer for group in manager.groups for layer in group.layers):
        rows = layer.layout.runs.tolist()  # (place in a block, length) of each run
        own = [[at + i for at, n in runs for i in range(n)] for runs in rows]
        layers.append((layer.kv_cache, torch.tensor(own)))
    (prompt,) = prompts.encode([prompts.TEXTS[PROMPT]], engine.get_tokenizer())
    nwor = play(engine, layers, prompt)
    if manager.shadow is None or manager.fallbacks:
        raise SystemExit(f"picture: mode stage did not run: {manager.fallbacks}")
    _wrap.unhook()
    runs = {"vllm": play(engine, layers, prompt), "nwor": nwor}
    if runs["nwor"]["tokens"] != runs["vllm"]["tokens"]:
        raise SystemExit(f"picture: the outputs differ: {runs}")
    about = environment.describe("cpu", ROOT)
    result = {
        "key": {"model": target.label, "vllm": records.vllm(about)},
        **about,
        "command": "python -m benchmarks.picture",
        "first_step": STEPS.start,
        "states": {state: meaning for state, (_, meaning) in SLOT_STATES.items()},
        "runs": runs,
    }
    records.append(records.RESULTS / "picture.jsonl", result)
    write_whole(ROOT / "docs" / "picture.png", drawn(result))


if __name__ == "__main__":
    main()
    settings.leave(0)
