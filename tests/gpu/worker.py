# SPDX-License-Identifier: Apache-2.0
"""GpuTestExtension: methods of vLLM's worker that the GPU tests call by collective_rpc,
on engines in this process and with several workers. They return plain data."""

import math
import re
import zlib
from dataclasses import asdict, replace
from typing import Any

import torch

from tests.gpu.engines import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from tests.helpers.byte_map import allocation, cache_of, slot_bytes
from tests.helpers.oracle import Memory
from tests.helpers.runner_probe import (
    block_tables,
    cache_layers,
    manager_of,
    observer_of,
    target_layers,
)
from tests.helpers.worker_probe import OracleExtension


class GpuTestExtension(OracleExtension):
    """Mixed into vLLM's worker class; `self.model_runner` is the worker's."""

    def test_randomize(
        self, seed: int, are_alike: bool = False, rank: int | None = None
    ) -> None:
        """Sets random weights of target and drafter in place, the same in every
        process, but for embeddings: each rank has those of other tokens. vLLM's dummy
        weights are so small that an fp8 cache would hold only zeros. rank: the only
        worker to do so, if not None.

        are_alike: the drafter gets the target's weights of the same name, an EAGLE head
        uses the token alone, and the target's further layers add little. Then more than
        half of the greedy drafts are right if the drafter reads its cache correctly."""
        runner = self.model_runner
        own = runner.vllm_config.parallel_config.rank
        if rank not in (None, own):
            return
        models = [runner.get_model(), draft_model(runner)]
        seen: set[int] = set()
        with torch.inference_mode():
            for number, model in enumerate(models):
                for name, parameter in model.named_parameters() if model else ():
                    if parameter.data_ptr() in seen:
                        continue
                    seen.add(parameter.data_ptr())
                    of = f" {own}" if own and "embed" in name else ""
                    fill(f"{seed} {0 if are_alike else number} {name}{of}", parameter)
                    if are_alike and name.endswith("fc.weight"):
                        torch.nn.init.eye_(parameter)
                    if are_alike and adds_after_first_layer(name):
                        parameter.mul_(0.2)
                renew_copies(model)

    def test_transfer(self) -> None:
        """Gives the worker a weight transfer engine that writes random weights."""
        self.weight_transfer_engine = Transfer(self)

    def test_fix_costs(self) -> None:
        """Makes the measured times and the estimate of adaptive verification the same
        in every process."""
        runner = self.model_runner
        manager = getattr(runner, "adaptive_verification", None)
        if manager is None:
            return
        numbers = range(1, MAX_NUM_BATCHED_TOKENS + 1)
        manager.set_cost_curves(
            [(1, 1.0), (MAX_NUM_SEQS, 1.0)], [(n, 1 + 0.1 * n) for n in numbers]
        )
        estimator = runner.speculator.acceptance_estimator
        if estimator is not None:
            estimator.REFIT_INTERVAL = 1 << 60

    def test_lose_begin(self, strictness: str) -> None:
        """Removes the hook of the V2 runner's begin, and sets VLLM_NWOR_STRICT."""
        from vllm_nwor.base import wrap as _wrap
        from vllm_nwor.config import Strict
        from vllm_nwor.hooks import ledger

        (hook,) = (h for h in _wrap._hooks if h.target == ledger.V2_PREPARE_ATTN)
        hook.take_off()
        manager = manager_of(self.model_runner)
        manager.config = replace(manager.config, strictness=Strict(strictness))

    def test_facts(self) -> dict[str, Any]:
        """vLLM's resolved configuration, and NWOR's protected layers."""
        runner = self.model_runner
        config = runner.vllm_config
        layers = cache_layers(runner).values()
        transaction, manager = observer_of(runner, "transaction"), manager_of(runner)
        states = (audit := observer_of(runner, "audit")) and audit.audit.states
        caches = zip(states.layers, states.caches, strict=True) if states else ()
        return {
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "backends": sorted({type(layer.impl).__name__ for layer in layers}),
            "flash_attn": sorted(
                {getattr(layer.impl, "vllm_flash_attn_version", 0) for layer in layers}
            ),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_scheduled_tokens": getattr(
                config.scheduler_config, "max_num_scheduled_tokens", None
            ),
            "num_blocks": runner.kv_cache_config.num_blocks,
            "targets": sorted(target_layers(runner)),
            "protected": manager
            and {
                "log_bytes_per_draft": manager.log_bytes_per_draft,
                "num_seats": getattr(manager.shadow, "num_seats", 0),
                "layers": [layer.name for g in manager.groups for layer in g.layers],
            },
            "resolved": [i.resolved for i in transaction.infos] if transaction else [],
            "states": sorted({f"{of[1]} {cache.dtype}" for of, cache in caches}),
        }

    def test_memory(self) -> dict[str, Any] | None:
        """Where NWOR's device memory lies; None without a manager.

        tables: rows of each table, by group. addresses: of the layers' caches, by
        group. pools: for each of the manager's tensors, cache_pools: for each cache,
        its `pool_tag`.
        """
        manager = manager_of(self.model_runner)
        if manager is None:
            return None
        tensors, tables, addresses = {"counters": manager.counters}, [], []
        for group in manager.groups:
            parts = {f"table {n}": part.table for n, part in enumerate(group.tables)}
            tables.append([table.tolist() for table in parts.values()])
            addresses.append(sorted(one.kv_cache.data_ptr() for one in group.layers))
            parts |= {"undo log": group.undo_log, "slots": group.log_slots}
            parts["windows"] = group.log_windows
            tensors |= {f"group {group.group_id} {n}": t for n, t in parts.items()}
        if manager.shadow is not None:
            saved = manager.shadow.saved.items()
            tensors |= {f"group {group_id} seats": kept for group_id, kept in saved}
        return {
            "tables": tables,
            "addresses": addresses,
            "cache_pools": [
                pool_tag(one) for of_group in addresses for one in of_group
            ],
            "pools": {name: pool_tag(t.data_ptr()) for name, t in tensors.items()},
        }

    def test_audit(self) -> dict[str, Any]:
        """The audit's findings so far, and how much it compared."""
        state = observer_of(self.model_runner, "audit")
        groups, states = state.audit.groups, state.audit.states
        return {
            "findings": [asdict(finding) for finding in state.findings.last],
            "totals": dict(state.audit.totals()),
            "counts": state.findings.totals(),
            "states": [] if states is None else states.totals.tolist(),
            "num_states": 0 if states is None else len(states.layers),
            "bytes": state.audit.num_bytes,
            "is_reserved": state.storage is not None,
            "pools": [
                pool_tag(t.data_ptr()) for g in groups for t in g.tensors.values()
            ],
        }

    def test_lose_state(self) -> dict[str, Any]:
        """Zeroes the last states of the batch's first request in the second layer that
        has some; returns which ones these are. (Groups share memory.)"""
        runner = self.model_runner
        layers = observer_of(runner, "audit").audit.states.layers
        name, state, gid = layers[len(layers) // 2]
        layer = runner.compilation_config.static_forward_context[name]
        blocks = block_tables(runner)[gid][0, :5].long()
        layer.kv_cache[-1][blocks] = 0
        of_state = {"kind": "changed_state", "state": state, "num_layers": 1}
        return {"layer": name, "group": gid} | of_state

    def test_flip_slot(self, number: int, slot: int) -> None:
        """Flips a bit of a slot in the target's layer of that number."""
        layer = list(target_layers(self.model_runner).values())[number]
        data = allocation(layer)
        data[int(slot_bytes(layer)[slot, 0])] ^= 1
        data[0].item()  # waits for the device

    def test_flip_stored(self) -> dict[str, Any]:
        """Changes what the OffloadingConnector has for its next load: of the second
        layer a bit of slot 5 of the third block, or low bits of all states. Returns
        what must be found."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        runner = self.model_runner
        audit = observer_of(runner, "audit").audit
        groups = runner.kv_cache_config.kv_cache_groups
        name = audit.states.layers[2][0] if audit.states else audit.groups[0].names[1]
        (gid,) = (n for n, of in enumerate(groups) if name in of.layer_names)
        worker = get_kv_transfer_group().connector_worker.worker
        handler = getattr(worker, "_load_handler", worker)
        # One for each layer, or one for all where a block has all layers' pages.
        refs, submit = handler.layer_refs_per_group[gid], worker.submit_load
        has_all = len(refs) < len(groups[gid].layer_names)
        ref = refs[0 if has_all else groups[gid].layer_names.index(name)]
        where: Any = slice(0, ref.page_size_bytes, 4)
        if not audit.states:
            layer = cache_layers(runner)[name]
            start = layer.kv_cache.storage_offset() * layer.kv_cache.element_size()
            where = int(slot_bytes(layer)[5, 0]) - (0 if has_all else start)

        def submit_load(job_id: int, source: Any, to: Any, **more: Any) -> Any:
            before = sum(to.group_sizes[:gid]) + (0 if audit.states else 2)
            page = handler.src_tensors[ref.tensor_idx][int(source.block_ids[before])]
            page.view(-1).view(torch.uint8)[where] ^= 1
            worker.submit_load = submit
            return submit(job_id, source, to, **more)

        worker.submit_load = submit_load
        found = {"layer": name, "group": gid, "num_layers": 1}
        size = runner.vllm_config.cache_config.block_size
        return found if audit.states else found | {"position": 2 * size + 5}

    def test_load(self, path: str) -> None:
        """Loads a `checkpoint` into the target; a rank takes its part."""
        self.model_runner.get_model().load_weights(torch.load(path))

    def test_slots(self, blocks: list[int], num_slots: int) -> torch.Tensor:
        """[target layers, num_slots, bytes] uint8, on the host: what the first slots of
        these blocks hold."""
        layers = target_layers(self.model_runner).values()
        read = [
            cache_of(layer)[blocks].transpose(1, 2).flatten(0, 1) for layer in layers
        ]
        slots = torch.stack([one[:num_slots].flatten(1) for one in read])
        return slots.contiguous().view(torch.uint8).cpu()

    def test_layouts(self) -> list[dict[str, Any]]:
        """`judge_layout` of each target layer."""
        layers = target_layers(self.model_runner).items()
        return [judge_layout(self.model_runner, name, layer) for name, layer in layers]


class Transfer:
    """In place of one of vLLM's weight transfer engines: an update is a seed, and goes
    into the parameters themselves, as with vLLM's engines that call no load_weights."""

    def __init__(self, worker: GpuTestExtension) -> None:
        self._worker = worker

    def update_weights(self, update_info: dict[str, int]) -> None:
        self._worker.test_randomize(update_info["seed"], True)

    def start_weight_update(self) -> None: ...

    finish_weight_update = reset_weight_update_target = shutdown = start_weight_update


def checkpoint(model: Any, seed: int) -> list[tuple[str, torch.Tensor]]:
    """What test_randomize(seed, True) writes to the target, on the host, by the names
    that load_weights knows. Not for a part of a tensor parallel model."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        value = torch.empty_like(parameter, device="cpu")
        fill(f"{seed} 0 {name}", value)
        if adds_after_first_layer(name):
            value.mul_(0.2)
        kind = name.split(".")[-2]
        if (parts := model.packed_modules_mapping.get(kind)) is None:
            found.append((name, value))
            continue
        sizes = model.get_submodule(name.removesuffix(".weight")).output_sizes
        for part, one in zip(parts, value.split(sizes), strict=True):
            found.append((name.replace(kind, part), one))
    return found


def draft_model(runner: Any) -> Any:
    """The drafter's model, None if it has none (ngram)."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(drafter, "model", None)
    if model is not None and hasattr(model, "unwrap"):
        model = model.unwrap()
    return model if isinstance(model, torch.nn.Module) else None


def renew_copies(model: torch.nn.Module | None) -> None:
    """Writes the weights to the copies that DFlash's and DSpark's drafters keep, for
    which graphs were captured."""
    inner = getattr(model, "model", None)
    names = ("_fused_kv_weight", "_k_norm_weights")
    kept = {name: getattr(inner, name, None) for name in names}
    if any(copied is None for copied in kept.values()):
        return
    inner._build_fused_kv_buffers()  # type: ignore[union-attr]
    for name, copied in kept.items():
        copied.copy_(getattr(inner, name))
        setattr(inner, name, copied)


def fill(name: str, parameter: torch.Tensor) -> None:
    """Random values seeded by `name`: norms are ones, embeddings have unit size, other
    weights preserve the size of their input. Mamba's states decay."""
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
        return
    if parameter.dim() < 2:
        parameter.fill_(-1.0 if name.endswith(".A") else 1.0)
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(parameter.shape, generator=generator)
    if "embed" not in name:
        values /= math.sqrt(parameter.shape[1])
    parameter.copy_(values.to(parameter.dtype))


def adds_after_first_layer(name: str) -> bool:
    """Whether it is the output projection of an attention or MLP behind layer 0."""
    layer = re.search(r"\.layers\.(\d+)\..*\.(o_proj|down_proj)\.", name)
    return layer is not None and layer[1] != "0"


def pool_tag(address: int) -> str | None:
    """The tag of `address` in vLLM's sleep-mode allocator; None if it is not in it."""
    from vllm.device_allocator.cumem import CuMemAllocator, cumem_available

    known = CuMemAllocator.get_instance().pointer_to_data if cumem_available else {}
    for start, data in known.items():
        size = data.handle[1]
        if start <= address < start + size:
            return str(data.tag)
    return None


# -- layouts ---------------------------------------------------------------------------


def judge_layout(runner: Any, name: str, layer: Any) -> dict[str, Any]:
    """Compares NWOR's layout of one layer with the bytes that vLLM's own writer
    changes, and whether probing changed the implementation or the caches; writes to the
    caches."""
    from vllm_nwor.hooks import layers
    from vllm_nwor.layout.kv_layout import LayoutRefused
    from vllm_nwor.layout.probe import probe_layout

    dtype = runner.vllm_config.model_config.dtype
    impl_before = dict(vars(layer.impl))
    caches = Memory(cache_layers(runner))
    caches_before = caches.read()
    answer: dict[str, Any] = {"layer": name, "impl": type(layer.impl).__name__}
    answer["backend"] = layer.get_attn_backend().get_name()
    try:
        layout = probe_layout(layer.kv_cache, layers._writer(layer, dtype))
    except LayoutRefused as refused:
        return answer | {"refused": str(refused)}
    # The same objects, not only equal ones.
    answer["impl_unchanged"] = impl_before.keys() == vars(layer.impl).keys() and all(
        impl_before[key] is value for key, value in vars(layer.impl).items()
    )
    answer["cache_unchanged"] = torch.equal(caches_before, caches.read())
    cache = layer.kv_cache
    slots = torch.tensor([0, layout.block_size - 1, layout.block_size + 3])
    changed = written_bytes(caches, layer, slots.to(cache.device), dtype).cpu()
    starts = cache.storage_offset() * cache.element_size()
    starts += slots // layout.block_size * layout.block_stride
    starts += slots % layout.block_size * layout.slot_stride
    heads = torch.arange(layout.num_heads)[:, None] * layout.head_stride
    expected = torch.zeros_like(changed)
    expected[starts[:, None, None] + heads + torch.arange(layout.run_bytes)] = True
    groups = getattr(manager_of(runner), "groups", ())
    return answer | {
        "dtype": str(cache.dtype),
        "shape": list(cache.shape),
        "strides": list(cache.stride()),
        "rows": layout.runs is None,
        "slot_bytes": layout.slot_bytes,
        "run_bytes": layout.run_bytes,
        "num_runs": layout.num_heads,
        "slot_bytes_expected": cache[0, ..., 0, :].nbytes,
        "is_protected": name in {layer.name for g in groups for layer in g.layers},
        "missed_bytes": int((changed & ~expected).sum()),
        "extra_bytes": int((expected & ~changed).sum()),
    }


def written_bytes(
    caches: Memory, layer: Any, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[bytes] bool: which bytes of the layer's allocation vLLM's writer changes when it
    writes random keys and values to `slots`, on two backgrounds. Raises if it writes to
    another layer."""
    whole, impl = allocation(layer), layer.impl
    changed = torch.zeros_like(whole, dtype=torch.bool)
    generator = torch.Generator(device=whole.device)

    def payload(*shape: int) -> torch.Tensor:
        shape = len(slots), *shape
        values = torch.rand(shape, generator=generator, device=whole.device) + 0.5
        return values.to(dtype)

    for background in (0x00, 0xFF):
        # A first write initializes the implementation (TRITON_ATTN fills all scales
        # with ones); then the background is set again.
        for _ in range(2):
            for one in caches.layers.values():
                allocation(one).fill_(background)
            generator.manual_seed(7)
            if hasattr(layer, "kv_lora_rank"):
                key = payload(layer.kv_lora_rank)
                value = -payload(1, layer.qk_rope_head_dim)
                scale = (impl.kv_cache_dtype, layer._k_scale)
                impl.do_kv_cache_update(key, value, layer.kv_cache, slots, *scale)
            else:
                shape = (layer.num_kv_heads, layer.head_size)
                key, value = payload(*shape), -payload(*shape)
                impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        differs = whole != background
        changed |= differs
        if int((caches.read() != background).sum()) > int(differs.sum()):
            raise RuntimeError(f"{type(impl).__name__} wrote outside its cache")
    return changed
