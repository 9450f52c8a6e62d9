# SPDX-License-Identifier: Apache-2.0
"""What speculative steps leave in the KV cache, without NWOR and with it: a picture.

    python -m benchmarks.picture       writes results/picture.json and docs/picture.png

One greedy request on real vLLM, on the CPU, with ngram drafts, twice in one engine:
with NWOR (mode stage), then with all of its hooks taken off. The caches are zeroed
before each run. Drafts and acceptance are those of vLLM's scheduler; what became of a
slot is read from the bytes of all layers, before and after each step. Which bytes are a
slot's is NWOR's layout, found by writing through vLLM's own writer (kv_probe.py).
"""

from pathlib import Path
from typing import Any

from benchmarks import environment, prompts, settings
from benchmarks.arguments import parse
from benchmarks.files import write_json, write_whole
from benchmarks.process import leave

ROOT = Path(__file__).resolve().parents[1]
# Which of prompts.json; which steps after the prompt's own; slots before their first.
PROMPT, STEPS, NUM_SLOTS_BEFORE = 1, range(9, 21), 3
# A slot after a step, as the file has it, with its color and meaning.
STATES = {
    ".": ("#ffffff", "nothing written"),
    "c": ("#cddcec", "committed before"),
    "a": ("#1f6fb4", "committed in this step"),
    "x": ("#d62f2f", "rejected in this step: bytes changed"),
    "d": ("#f2b5ae", "left behind by an earlier step"),
    "o": ("#7cc47c", "rejected in this step: bytes as before"),
}
TITLES = {
    "vllm": "vLLM: keys and values of rejected drafts stay in the cache",
    "nwor": "vLLM with NWOR: slots of rejected drafts are as before the step",
}
# Of each layer: its cache [bytes] uint8, the bytes of a block, and [slots of a block,
# bytes of a slot] int64, the place of each byte in its block.
Layers = list[tuple[Any, int, Any]]


def read(layers: Layers, blocks: list[int]) -> Any:
    """[num_slots, bytes of a slot in all layers] uint8: the slots of `blocks`."""
    import torch

    return torch.cat(
        [torch.cat([c[b * size :][own] for b in blocks]) for c, size, own in layers],
        dim=1,
    )


def play(engine: Any, layers: Layers, prompt: list[int]) -> dict[str, Any]:
    """Runs the prompt up to the last of STEPS, then aborts it.

    Returns tokens; first_slot; steps: [drafts, accepted] of each; slots: STATES of
    first_slot and those behind it after each step.
    """
    from vllm import SamplingParams

    for cache, _, _ in layers:
        cache.zero_()
    sampling = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    engine.add_request("picture", {"prompt_token_ids": prompt}, sampling)
    scheduler = engine.engine_core.engine_core.scheduler
    (request,) = scheduler.requests.values()
    for _ in range(STEPS.start):
        engine.step()
    every = list(range(scheduler.cache_config.num_gpu_blocks))
    first, steps, slots = request.num_tokens - 1 - NUM_SLOTS_BEFORE, [], []
    for _ in STEPS:
        known, drafts = request.num_tokens, len(request.spec_token_ids)
        before = read(layers, every)
        engine.step()
        accepted = request.num_tokens - known - 1
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        after = read(layers, blocks)
        before = before.unflatten(0, (len(every), -1))[blocks].flatten(0, 1)
        differs, written = (after != before).any(1), after.any(1)
        found = ["d" if one else "." for one in written.tolist()]
        found[: known - 1] = "c" * (known - 1)
        found[known - 1 : known + accepted] = "a" * (1 + accepted)
        for slot in range(known + accepted, known + drafts):
            found[slot] = "x" if differs[slot] else "o"
        steps.append([drafts, accepted])
        slots.append("".join(found[first:]).rstrip("."))
    tokens = list(request.output_token_ids)
    engine.abort_request(["picture"])
    while engine.has_unfinished_requests():
        engine.step()
    slots = [row.ljust(max(map(len, slots)), ".") for row in slots]
    return {"tokens": tokens, "first_slot": first, "steps": steps, "slots": slots}


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the picture of a result, a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colors = ListedColormap([color for color, _ in STATES.values()])
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, title) in zip(figure.subplots(2, 1), TITLES.items(), strict=True):
        run = result["runs"][name]
        cells = [[list(STATES).index(one) for one in row] for row in run["slots"]]
        slots = range(run["first_slot"], run["first_slot"] + len(cells[0]))
        grid = {"edgecolors": "#e4e4e4", "linewidth": 0.6}
        axes.pcolormesh(slots, STEPS, cells, cmap=colors, vmin=0, vmax=5, **grid)
        axes.invert_yaxis()
        axes.set_yticks(STEPS, [str(step) for step in STEPS], fontsize=7)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel("step")
    axes.set_xlabel("slot of the request in the KV cache")
    patches = [
        Patch(facecolor=color, edgecolor="#b0b0b0", label=meaning)
        for color, meaning in STATES.values()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, format="png", dpi=110)


def main() -> None:
    """Runs, writes and draws; raises if the two runs' outputs differ."""
    options = parse(["--batch-size", "1"])
    settings.prepare_process(options, "cpu")
    import torch
    from vllm import EngineArgs, LLMEngine

    from vllm_nwor.hooks import _wrap

    target, drafter = settings.find_models(options)
    arguments = settings.engine_arguments(options, "cpu", target, drafter)
    arguments |= {"num_gpu_blocks_override": 40, "max_model_len": 512, "block_size": 32}
    engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    manager = worker.model_runner.nwor_state.manager
    layers: Layers = []
    for layer in (layer for group in manager.groups for layer in group.layers):
        cache, rows = layer.kv_cache, layer.layout.runs.tolist()
        whole = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        own = [[at + i for at, n in runs for i in range(n)] for runs in rows]
        start = cache.storage_offset() * cache.element_size()
        layers.append((whole[start:], layer.layout.block_stride, torch.tensor(own)))
    (prompt,) = prompts.encode([prompts.read(None)[PROMPT]], engine.get_tokenizer())
    nwor = play(engine, layers, prompt)
    if manager.shadow is None or manager.fallbacks:
        raise SystemExit(f"picture: mode stage did not run: {manager.fallbacks}")
    _wrap.unhook()
    runs = {"vllm": play(engine, layers, prompt), "nwor": nwor}
    if runs["nwor"]["tokens"] != runs["vllm"]["tokens"]:
        raise SystemExit(f"picture: the outputs differ: {runs}")
    result = {
        "kind": "picture",
        "command": "python -m benchmarks.picture",
        "model": target.label,
        "environment": environment.describe("cpu", ROOT),
        "states": {state: meaning for state, (_, meaning) in STATES.items()},
        "runs": runs,
    }
    write_json(ROOT / "results" / "picture.json", result)
    write_whole(ROOT / "docs" / "picture.png", lambda path: draw(result, path))


if __name__ == "__main__":
    main()
    leave(0)
