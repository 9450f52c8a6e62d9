# SPDX-License-Identifier: Apache-2.0
"""The KV audit on real engines: no finding in correct runs, and planted faults are
found.

Correct runs have the requests of the byte oracle, with all bytes compared; more of them
in modes cow and stage: test_byte_oracle.py. Bits are flipped in the cache tensor by the
packing rules of tests/helpers/byte_map.py, which are independent of the audit. More
planted faults: tests/e2e/test_audit_selftest.py, tests/kernels/test_audit.py.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler

from tests.helpers.engine import BLOCK_SIZE, Engine, Request
from tests.helpers.environment import model_path
from tests.helpers.lora import lora
from tests.helpers.runner_probe import Observer, request_name
from tests.helpers.sessions import Session, draft_rightly, play
from tests.helpers.worker_probe import OracleExtension
from tests.integration.test_byte_oracle import (
    CACHES,
    EVERYTHING,
    FEW_BLOCKS,
    REQUESTS,
    Case,
    case_of,
    check_clean,
    prompt,
    watch,
)
from tests.integration.test_reach import IDLE, METHODS, MODELS
from vllm_nwor.audit import incident
from vllm_nwor.audit.findings import AuditError, Finding


def found(engine: Engine) -> list[Finding]:
    return list(engine.audit.findings.last)


# --- correct runs ---------------------------------------------------------------------

CASES = {
    "draft_model": METHODS["draft_model"],
    # Without chunked prefill and prefix caching.
    "mla": MODELS["DeepSeek V2, multi-head latent attention"],
    "no speculation": lambda: Case({"speculative_config": None}),
}
CLEAN = [
    *itertools.product(["off"], (*CACHES, "draft_model", "mla", "no speculation")),
    *itertools.product(["cow"], ("draft_model", "mla")),
]


@pytest.mark.parametrize(("mode", "name"), CLEAN)
def test_a_correct_run_has_no_finding(mode: str, name: str) -> None:
    """A draft model's layers are in the target's group and written after commit: they
    are not audited."""
    if name in CASES:
        case = CASES[name]()
        blocks = {"num_gpu_blocks_override": 32 if name == "mla" else 16}
        case = replace(case, arguments=FEW_BLOCKS | case.arguments | blocks)
    else:
        case = case_of(name)
    speculates = case.arguments.get("speculative_config", {}) is not None
    engine = case.engine(mode, EVERYTHING)
    assert (engine.manager is None) == (mode == "off")
    if speculates:
        run = watch(engine, case=case)
        check_clean(run)
        assert any(map(any, run.own)) == case.keeps_drafter
        result = run.result
    else:
        result = engine.run(REQUESTS)
    assert result.num_preemptions > 0
    assert (sum(result.cached.values()) > 0) == (name != "mla")
    # A request id is used again.
    engine.run([Request("short", prompt(2, 3), 60, abort_at=9)])
    engine.run([Request("short", prompt(12, 40), 30), REQUESTS[0]])
    assert found(engine) == []
    assert engine.audit.audit.totals()["contents"] > 20_000


def test_a_window_over_layers_of_different_sizes(tmp_path: Path) -> None:
    """Target and draft model have the same window and different heads: vLLM's workers
    have a spec per layer of the group, and free blocks below the window."""
    window = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 64}
    config = json.loads(Path(model_path("tiny-llama-draft"), "config.json").read_text())
    draft = config | window | {"num_hidden_layers": 4, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(draft))
    speculative = {"method": "draft_model", "model": str(tmp_path)}
    engine = Engine(
        "off",
        EVERYTHING,
        load_format="dummy",
        hf_overrides=window,
        num_gpu_blocks_override=24,
        speculative_config=speculative | {"num_speculative_tokens": 4},
    )
    engine.run([Request(f"{n}", prompt(n, 150), 60, at=6 * n) for n in range(6)])
    assert found(engine) == []


# --- planted faults -------------------------------------------------------------------


def test_slots_below_a_window_are_audited_if_vllm_keeps_them() -> None:
    """Without the hybrid manager windowed layers are in one group with full
    attention."""
    arguments = {"model": "tiny-gemma3", "disable_hybrid_kv_cache_manager": True}
    engine = Engine("off", EVERYTHING, **arguments)
    expected: list[Any] = []
    with engine.before_step(12, lambda: expected.append(flip(engine))):
        engine.run([Request("a", prompt(1, 200), 30)])
    assert [(f.kind, f.layer, f.slot) for f in found(engine)] == [expected[0][:3]]


@pytest.fixture(scope="module")
def audited() -> Engine:
    loras = {"enable_lora": True, "max_loras": 2}
    arguments = {"enable_prefix_caching": True, "disable_log_stats": False}
    return Engine("off", EVERYTHING, **arguments, **loras)


def flip(engine: Engine) -> tuple[str, str, int, str]:
    """Flips a bit of a committed slot; returns the expected finding."""
    place = OracleExtension.test_flip_bit(SimpleNamespace(model_runner=engine.runner))
    owner = request_name(engine.runner.input_batch.req_ids[0])
    return "changed", place["layer"], place["slot"], owner


def test_a_flipped_bit_is_found_at_its_place_and_counted(audited: Engine) -> None:
    def metrics() -> dict[tuple[str, str | None], int]:
        return {
            (metric.name, metric.labels.get("class")): metric.value
            for metric in audited.llm.get_metrics()
            if metric.name.startswith("vllm:nwor")
        }

    before = metrics()
    assert set(before.values()) == {0}
    assert ("vllm:nwor_audit_findings", "changed") in before
    assert ("vllm:nwor_audit_unverified", None) in before
    expected: list[Any] = []
    with audited.before_step(12, lambda: expected.append(flip(audited))):
        audited.run([Request("a", prompt(1, 80), 30), Request("b", prompt(2, 50), 40)])

    assert expected == [
        (f.kind, f.layer, f.slot, request_name(f.writer.request or ""))
        for f in found(audited)
    ]
    rise = {key: value for key, value in metrics().items() if value}
    # Steps are reported in batches, and at once with a finding.
    assert 12 <= rise.pop(("vllm:nwor_audit_steps", None)) < 40
    assert rise == {("vllm:nwor_audit_findings", "changed"): 1}


@pytest.fixture(scope="module")
def connected() -> Engine:
    """With an unknown KV connector, which loads nothing."""
    arguments = {"enable_prefix_caching": True, "kv_transfer_config": IDLE}
    return Engine("off", EVERYTHING, **arguments, speculative_config=None)


@pytest.fixture(scope="module")
def sees() -> Engine:
    """Takes images, and prompts of embeddings."""
    arguments = FEW_BLOCKS | {"enable_prompt_embeds": True}
    return Engine("off", EVERYTHING, "tiny-blip2", **arguments)


def alike(mine: dict[str, Any], theirs: dict[str, Any]) -> list[Request]:
    """Three requests of one text, which share blocks if nothing else differs."""
    return [
        Request("mine", prompt(77, 80), 8, **mine),
        Request("again", prompt(77, 80), 8, at=12, **mine),
        Request("theirs", prompt(77, 80), 8, at=24, **theirs),
    ]


@contextmanager
def other_keys(of: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Iterator[None]:
    """The prefix cache uses this function of vLLM's keys."""
    own = kv_cache_utils.generate_block_hash_extra_keys

    def bent(*args: Any) -> tuple[Any, int]:
        keys, num_images = own(*args)
        return of(keys or ()) or None, num_images

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", bent)
        yield


def texts_alone(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return ()


def bare_names(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """As vLLM 0.26.0 and 0.29.0, which do not distinguish an adapter from a salt."""
    return tuple(key[1] for key in keys)


# How "theirs" differs from "mine"; the keys, and the tokens found with them.
SETS_APART = {
    "salt": (texts_alone, 64),
    "salt, with a connector": (texts_alone, 64),
    "adapter": (texts_alone, 64),
    "adapter of the same name": (bare_names, 64),
    # vLLM has the salt in the first block's key only.
    "adapter, and a salt of its name": (bare_names, 32),
    "image": (texts_alone, 64),
}


@pytest.mark.parametrize("kind", SETS_APART)
def test_a_wrongly_shared_block_of_the_same_text_is_found(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also with an unknown KV connector: the scheduler knows which part of a prefix was
    in the cache."""
    keys, num_found = SETS_APART[kind]
    fixture = (
        "connected" if "connector" in kind else "sees" if kind == "image" else None
    )
    engine: Engine = request.getfixturevalue(fixture or "audited")
    requests = alike({"salt": "a"}, {"salt": "b"})
    if "adapter" in kind:
        name = "acme" if "name" in kind else None
        model = model_path("tiny-llama")
        adapters = [lora(tmp_path, n, model, name) for n in (1, 2)]
        requests = alike(*({"lora": adapter} for adapter in adapters))
        # The same adapter under another number.
        again = LoRARequest(adapters[0].name, 3, adapters[0].path)
        requests[1] = replace(requests[1], lora=again)
    if "of its name" in kind:
        requests[2] = replace(requests[2], lora=None, salt=name)
    if kind == "image":
        requests = alike({"image": (200, 0, 0)}, {"image": (0, 0, 200)})
    engine.poison_caches()
    engine.audit.findings.last.clear()
    unverified = engine.audit.audit.totals()["unverified"]
    result = engine.run(requests)
    assert result.cached == {"mine": 0, "again": 64, "theirs": 0}
    if "salt" not in kind:
        assert result.tokens["mine"] == result.tokens["again"]
        assert result.tokens["mine"] != result.tokens["theirs"]
    assert found(engine) == []
    engine.llm.reset_prefix_cache()
    with other_keys(keys):
        result = engine.run(requests)

    assert result.cached == {"mine": 0, "again": 64, "theirs": num_found}
    wrong = found(engine)
    assert [(f.kind, f.position) for f in wrong] == [
        ("wrong_prefix", position) for position in range(0, num_found, BLOCK_SIZE)
    ]
    assert {request_name(f.writer.request or "") for f in wrong} == {"mine"}
    assert {request_name(f.owner or "") for f in wrong} == {"theirs"}
    assert engine.audit.audit.totals()["unverified"] == unverified


def test_a_correct_run_with_images_has_no_finding(sees: Engine) -> None:
    """One text with two images, and without one; chunked prefill, preemption and prefix
    hits."""
    colours = [(200, 0, 0), (200, 0, 0), (0, 0, 200), None]
    requests = [
        Request(f"{n}", prompt(30, 80) + prompt(n, 9), 60, at=9 * n, image=of)
        for n, of in enumerate(colours * 3)
    ]
    sees.poison_caches()
    sees.audit.findings.last.clear()
    before = sees.audit.audit.totals()
    result = sees.run(requests)
    assert result.num_preemptions > 0
    assert sum(result.cached.values()) > 4 * BLOCK_SIZE
    assert result.num_drafted > 0
    assert found(sees) == []
    after = sees.audit.audit.totals()
    assert after["unverified"] == before["unverified"]
    assert after["contents"] > before["contents"] + 20_000


def test_prefix_hits_of_embeddings_are_unverified(sees: Engine) -> None:
    """vLLM's workers do not know their hashes: right or wrong, they are counted."""
    draw = torch.Generator().manual_seed(0)
    width = sees.runner.model_config.get_hidden_size()
    one, other = torch.randn((2, 80, width), generator=draw).bfloat16()
    requests = [
        Request("mine", (), 8, embeds=one),
        Request("again", (), 8, at=12, embeds=one),
        Request("theirs", (), 8, at=24, embeds=other),
    ]
    sees.poison_caches()
    sees.audit.findings.last.clear()
    for keys, cached in ((lambda keys: keys, 0), (texts_alone, 64)):
        sees.llm.reset_prefix_cache()
        unverified = sees.audit.audit.totals()["unverified"]
        with other_keys(keys):
            result = sees.run(requests)
        assert result.cached == {"mine": 0, "again": 64, "theirs": cached}
        assert sees.audit.audit.totals()["unverified"] == unverified + 64 + cached
        assert found(sees) == []


# --- streaming sessions ---------------------------------------------------------------


def test_a_sessions_text_is_verified_with_a_connector(connected: Engine) -> None:
    """The second turn continues in the first one's blocks. A bit is flipped in
    between."""
    connected.audit.findings.last.clear()
    before = connected.audit.audit.totals()
    session = Session(connected, "session")
    assert len(session.turn(prompt(40, 100), 6)) == 6
    group = connected.runner.kv_cache_config.kv_cache_groups[0]
    (block, *_) = connected.scheduler.kv_cache_manager.get_block_ids(session.id)[0]
    layer = group.layer_names[2]
    cache = connected.runner.compilation_config.static_forward_context[layer].kv_cache
    cache[block, 0, 0].view(torch.uint8)[7] ^= 1
    session.turn(prompt(41, 3), 6)
    session.turn(prompt(42, 3), 6)
    session.end()

    assert [(f.kind, f.layer, f.block) for f in found(connected)] == [
        ("changed", layer, block)
    ]
    after = connected.audit.audit.totals()
    assert after["unverified"] == before["unverified"]


def test_a_stale_block_key_of_a_session_is_found(
    connected: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM up to 0.29 keeps the key of a block whose last token it drops when more
    input comes: a request with that token gets another text's block."""
    update = Scheduler._update_request_as_session

    class Kept(list):  # type: ignore[type-arg]
        def __delitem__(self, where: Any) -> None: ...

    def stale(scheduler: Any, session: Any, more: Any) -> None:
        session.block_hashes = Kept(session.block_hashes)
        update(scheduler, session, more)

    for is_planted in (False, True):
        if is_planted:
            monkeypatch.setattr(Scheduler, "_update_request_as_session", stale)
        connected.poison_caches()
        connected.audit.findings.last.clear()
        session = Session(connected, "session")
        text = prompt(43, 2 * BLOCK_SIZE - 6)
        reply = session.turn(text, 6)
        session.turn(prompt(44, 20), 6)
        later = Request("later", (*text, *reply, 7, 8), 4)
        result = connected.run([later])
        session.end()
        assert result.cached["later"] == BLOCK_SIZE * (1 + is_planted)
        expected = [("wrong_prefix", 2 * BLOCK_SIZE - 1, "session")] * is_planted
        assert [
            (f.kind, f.position, request_name(f.writer.request or ""))
            for f in found(connected)
        ] == expected


@pytest.mark.parametrize("mode", ["off", "cow", "stage"])
def test_turns_that_end_within_accepted_drafts_are_found(
    mode: str, audited: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 counts accepted drafts behind a turn's end as computed, so that the
    next turn attends to them. There is no finding in other sessions, or without
    drafts."""
    engine = audited if mode == "off" else Engine(mode, EVERYTHING)
    engine.audit.findings.last.clear()
    plans = list(itertools.product(range(2, 13), (0, 1, 2, 4)))
    first = {
        f"{n}": ((prompt(50 + n, 30 + 5 * n), max_tokens), num_right)
        for n, (max_tokens, num_right) in enumerate(plans)
    }
    # The first token comes without drafts. The next turn discards the last one.
    by_arithmetic = {
        f"{n}" for n, (num, right) in enumerate(plans) if (1 - num) % (right + 1) > 1
    }
    assert (len(first), len(by_arithmetic)) == (44, 11)
    sessions = {
        name: [turn, (prompt(99, 12), 4), (prompt(98, 3), 3)]
        for name, (turn, _) in first.items()
    }
    draft_rightly(engine, first)
    corrupt = set()
    scheduler = engine.core.scheduler
    resume = scheduler._update_request_as_session

    def watched(session: Any, update: Any) -> None:
        if session.num_computed_tokens > session.num_tokens:
            corrupt.add(request_name(session.request_id))
        resume(session, update)

    monkeypatch.setattr(scheduler, "_update_request_as_session", watched)
    assert found(engine) == []
    play(engine, sessions)
    wrong = found(engine)
    assert {request_name(finding.owner or "") for finding in wrong} == corrupt
    assert {finding.kind for finding in wrong} <= {"wrong_prefix"}
    # vLLM 0.33 has fixed it.
    is_mended = not corrupt and Version(vllm.__version__) >= Version("0.33")
    assert is_mended or corrupt == by_arithmetic


def test_mode_raise_ends_the_step_and_the_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "findings.json"
    settings = EVERYTHING | {"AUDIT": "raise", "AUDIT_FILE": str(path)}
    settings["AUDIT_INCIDENT"] = str(tmp_path / "incident.json")
    engine = Engine("cow", settings)
    content = json.loads(path.read_text())
    about = content["audit"], content["vllm"], content["groups"]
    assert about == ("raise", vllm.__version__, {"0": "4 layers"})
    assert (content["steps"], content["num_findings"], content["findings"]) == (
        0,
        0,
        [],
    )
    expected: list[Any] = []
    with (
        engine.before_step(12, lambda: expected.append(flip(engine))),
        pytest.raises(AuditError, match="1 findings, the first: changed: "),
    ):
        engine.run([Request("a", prompt(3, 80), 60)])

    written = json.loads(path.read_text())
    assert (written["counts"], written["steps"]) == ({"changed": 1}, 12)
    (finding,) = written["findings"]
    ((*where, _),) = expected
    assert [finding["kind"], finding["layer"], finding["slot"]] == where
    names = ["findings.json", "incident.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    recorded, report = incident.read(tmp_path / "incident.json")
    assert [len(table.prompt) for table in recorded.tables] == [0]  # by default
    assert recorded.engine == incident.Engine("cow", model_path("tiny-llama"), "")
    assert ([finding], written["steps"]) == (
        [asdict(one) for one in report.findings],
        recorded.steps[-1].step,
    )


def test_an_incident_file_has_the_block_tables_of_the_runner(tmp_path: Path) -> None:
    """In each step, with preemptions, hits, aborts, names used again; and prompts."""
    path = tmp_path / "incident.json"
    settings = {"AUDIT_INCIDENT": str(path), "AUDIT_INCIDENT_TOKENS": "1"}
    engine = Engine("cow", EVERYTHING | settings, **FEW_BLOCKS)
    recorder = engine.audit.audit.recorder
    ends = Counter[str]()
    num_compared = 0

    class Tables(Observer):
        def committed(self, step: Any) -> None:
            nonlocal num_compared
            batch, record = engine.runner.input_batch, recorder._steps[-1]
            ends.update(table.why for table in record.ended)
            table = batch.block_table[0].block_table.np
            seats = {name: row for row, name in enumerate(batch.req_ids)}
            assert list(record.seats) == list(seats)
            assert record.tokens.keys() == seats.keys()
            for name, row in seats.items():
                of = recorder._tables[name]
                (blocks,), (steps,) = of.blocks, of.steps
                tokens = batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]]
                assert of.prompt.tolist() == tokens.tolist()
                assert table[row, : len(blocks)].tolist() == blocks.tolist()
                assert len(blocks) == batch.block_table[0].num_blocks_per_row[row]
                assert steps.tolist() == sorted(steps)
                num_compared += len(blocks)

    result = engine.run(REQUESTS, [Tables()])
    engine.run([Request("short", prompt(12, 40), 30)], [Tables()])
    assert result.num_preemptions == ends["preempted"] > 0
    assert ends["finished or aborted"] > len(REQUESTS) // 2
    assert num_compared > 1000
    assert recorder.is_on
    assert not path.exists()
