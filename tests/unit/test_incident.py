# SPDX-License-Identifier: Apache-2.0
"""The incident file: what a Recorder keeps of made-up steps, when it writes, and what
`explain` says of the file. With a real engine: tests/integration/test_audit.py."""

import json
import os
import re
import signal
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.environment import run_python
from tests.helpers.logs import nwor_log
from vllm_nwor.audit import explain, incident
from vllm_nwor.audit import incident_cases as cases
from vllm_nwor.audit.findings import CLASSES, Finding, Writer
from vllm_nwor.audit.incident import NUM_STEPS, Engine, Recorder
from vllm_nwor.hooks.scheduled import ScheduledStep
from vllm_nwor.step import Transfer, Weights

N = 16  # tokens a block


def finding(kind="changed", block=7, owner="b", writer=("a", 3), step=9):
    about = Writer(writer[0], 1, writer[1])
    where = 0, "layers.1", 1, block, block * N + 2, 18
    return Finding(kind, *where, owner, about, step, "0x1", "0x2")


class World:
    """A recorder and what it records."""

    def __init__(self, folder, *findings, **how):
        self.path = folder / "incident.json"
        self.findings = list(findings)
        of = Engine("cow", "tiny", "")
        self.recorder = Recorder(str(self.path), of, [N, N], self.report, **how)

    def report(self):
        versions = {"audit": "log", "nwor": "0.1", "vllm": "0.32.0", "torch": "2.11"}
        found = [asdict(one) for one in self.findings]
        counts = {"groups": {"0": "2 layers"}, "steps": 9, "num_findings": len(found)}
        return versions | counts | {"findings": found}

    def step(self, number, new=(), running=(), **others):
        """new: (name, blocks of group 0, tokens computed). running: the same, and
        whether it is resumed."""
        scheduled = SimpleNamespace(
            finished_req_ids=others.get("finished", ()),
            preempted_req_ids=others.get("preempted", ()),
            new_block_ids_to_zero=others.get("zeroed", ()),
            kv_cache_block_copies=others.get("copied", ()),
            nwor_weights=Weights(epoch=others.get("epoch", 0)),
            num_scheduled_tokens={name: 5 for name, *_ in [*new, *running]}
            | others.get("tokens", {}),
            scheduled_spec_decode_tokens={name: [70_000] * 4 for name, *_ in running},
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name,
                    block_ids=[blocks, []],
                    num_computed_tokens=num_computed,
                    mm_features=[],
                    prompt_embeds=None,
                    prompt_token_ids=[70_000 + 100 * number + p for p in range(40)],
                )
                for name, blocks, num_computed in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, *_ in running],
                new_block_ids=[blocks and [blocks, []] for _, blocks, *_ in running],
                num_computed_tokens=[num for _, _, num, *_ in running],
                resumed_req_ids={name for name, *_, is_back in running if is_back},
            ),
        )
        self.recorder.begin_step(number, ScheduledStep(scheduled))
        self.recorder.rows((name, row) for row, (name, *_) in enumerate(running))

    def file(self):
        return json.loads(self.path.read_text())

    def explained(self, capsys):
        """What is printed of the file that the findings make it write."""
        self.recorder.found()
        assert explain.main([str(self.path)]) == 0
        return capsys.readouterr().out


def story(folder, *findings, **how):
    """Block 7: of "a" from step 2 to 4, of "b" as a prefix hit from step 5, which is
    preempted and resumes without it; loaded in step 6."""
    world = World(folder, *findings, **how)
    world.step(1, [("a", [3], 0)])
    world.step(2, (), [("a", [7], 16, False)])
    world.step(3, (), [("a", None, 20, False)])
    world.step(4, (), [("a", None, 25, False)])
    world.step(5, [("b", [3, 7, 9], 32)], finished={"a"})
    world.recorder.transfer(Transfer([[7], []], None, True))
    world.step(6, (), [("b", None, 40, False)])
    world.step(7, (), (), preempted={"b"}, epoch=1)
    world.step(8, (), [("b", [4, 5], 0, True)], epoch=1)
    return world


# --- what is kept ---------------------------------------------------------------------


def test_a_table_says_when_each_block_came_and_went(tmp_path):
    world = story(tmp_path, finding())
    world.recorder.found()

    written = world.file()
    steps = {record["step"]: record for record in written["steps"]}
    assert list(steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    (of_a,) = steps[5]["ended"]
    assert (of_a["request"], of_a["blocks"]) == ("a", [[3, 7], []])
    assert of_a["steps"] == [[1, 2], []]
    assert (of_a["until"], of_a["why"]) == (4, "finished or aborted")
    (of_b,) = steps[7]["ended"]
    assert (of_b["since"], of_b["num_found"], of_b["until"]) == (5, 32, 6)
    (again,) = written["tables"]
    assert (again["request"], again["blocks"], again["epoch"]) == ("b", [[4, 5], []], 1)
    assert steps[5]["transfers"] == [{"fills": True, "blocks": [[7], []]}]
    assert (steps[6]["tokens"], steps[6]["drafts"]) == ({"b": 5}, {"b": 4})
    assert (steps[6]["computed"], steps[6]["seats"]) == ({"b": 40}, {"b": 0})


def test_as_many_steps_are_kept_as_there_is_room_for(tmp_path, monkeypatch):
    world = World(tmp_path, finding(), has_tokens=True)
    for number in range(1, 200):
        names = [(f"r{number}", list(range(10)), 0)]
        world.step(number, names, finished={f"r{number - 1}"})
    world.recorder.found()
    written = world.file()
    assert [r["step"] for r in written["steps"]] == list(range(200 - NUM_STEPS, 200))
    assert [table["request"] for table in written["tables"]] == ["r199"]

    for number in range(200, 300):  # as vLLM's dummy runs: they are no steps
        world.step(number, tokens={"_dummy_req_0": 5})
    monkeypatch.setattr(incident, "MAX_VALUES", 250)  # each ended table has 20 + 40
    world.step(200, (), finished={"r199"})
    world.recorder.transfer(Transfer([[1] * 11, []], None, False))
    world.step(201)
    world.recorder.write("SIGUSR2")
    assert [record["step"] for record in world.file()["steps"]] == [198, 199, 200, 201]


# --- the file -------------------------------------------------------------------------


def test_nothing_is_written_before_a_finding_then_not_too_often(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0)
    monkeypatch.setattr(incident, "time", clock)
    world = story(tmp_path)
    assert not world.path.exists()
    world.findings.append(finding())
    world.recorder.found()
    assert len(world.file()["report"]["findings"]) == 1
    world.findings.append(finding(step=10))
    world.recorder.found()
    clock.now = 1009.9
    world.step(9)
    assert len(world.file()["report"]["findings"]) == 1
    clock.now = 1010.0
    world.step(10)
    assert len(world.file()["report"]["findings"]) == 2
    world.findings.append(finding(step=11))
    world.recorder.found()
    world.recorder.close()
    assert len(world.file()["report"]["findings"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["incident.json"]


def test_a_file_that_cannot_be_written_is_one_line_and_the_end(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    world = story(folder, finding())
    folder.rmdir()
    with nwor_log() as lines:
        world.recorder.found()
        world.recorder.found()
        world.step(9)
        world.recorder.close()
    said = f"ERROR NWOR audit: no incident file any more: {world.path} could not be wri"
    assert [line[: len(said)] for line in lines] == [said]
    assert not world.recorder.is_on


def test_an_error_while_recording_ends_the_file_and_no_step(tmp_path):
    world = story(tmp_path)
    with nwor_log() as lines:
        world.recorder.begin_step(9, SimpleNamespace())
        world.recorder.transfer(Transfer([[1], []], None, True))
    assert len(lines) == 1
    assert "incident.json could not be made: AttributeError: " in lines[0]


def test_a_signal_writes_it_also_while_the_recorder_is_busy(tmp_path):
    earlier, before = [], signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda number, frame: earlier.append(number))
    try:
        with nwor_log() as lines:
            world = story(tmp_path)
        assert f"writes {world.path}, or `kill -USR2 {os.getpid()}`" in lines[0]
        with world.recorder._lock:  # as in the middle of a step
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.05)
        deadline = time.monotonic() + 5
        while not world.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert earlier == [signal.SIGUSR2]
    assert (world.file()["why"], world.file()["steps"][-1]["step"]) == ("SIGUSR2", 8)


def test_a_worker_in_another_thread_has_no_signal(tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    with nwor_log() as lines:
        thread = threading.Thread(target=World, args=(tmp_path,))
        thread.start()
        thread.join()
    assert lines[0].endswith(
        "; not on SIGUSR2: this is not the main thread of its process"
    )
    assert signal.getsignal(signal.SIGUSR2) is before


def test_tokens_are_in_the_file_if_asked_for_alone(tmp_path, capsys, monkeypatch):
    """Of prompts, also where a request was resumed, or its name came again."""
    has_token = re.compile(r"\b70\d{3}\b").search  # of a prompt or a draft
    monkeypatch.setattr(cases, "NUM_TOKENS", 1)
    findings = [finding(step=8), finding(block=4, step=9)]
    findings.append(replace(finding(block=9, owner="a"), position=0))
    findings.append(replace(finding(block=5, step=9), position=40))
    world = story(tmp_path, *findings, has_tokens=True)
    assert world.recorder._prompts.keys() == {"b"}
    world.step(9, [("b", [4], 0)])
    assert re.findall("Tokens: (.*)", world.explained(capsys)) == [
        "the prompt of b has 40, from position 17 on: 70517 [70518] 70519.",
        "the prompt of b has 40, from position 17 on: 70917 [70918] 70919.",
        "the prompt of a has 40, from position 0 on: [70100] 70101.",
        "the prompt of b has 40, from position 39 on: 70939.",
    ]
    assert has_token(world.path.read_text())

    world = story(tmp_path, *findings)
    assert "Tokens" not in world.explained(capsys)
    assert not has_token(world.path.read_text())


# --- what it says ---------------------------------------------------------------------


def test_what_lies_between_a_write_and_a_finding_is_named(tmp_path, capsys):
    world = story(tmp_path, finding(step=6))
    said = world.explained(capsys)
    assert "1. changed in step 6: bytes are no longer those that were committed" in said
    assert "Who: b reads it, and a wrote it last, in step 3." in said
    place = "as block 1 of its table"
    assert f"History: a was given it in step 2, {place}; to step 4 (finished" in said
    assert f"b found it in the cache in step 5, {place}; to step 6 (preempted)." in said
    (between,) = re.findall(r"Since the last write: (.*)\.", said)
    assert between.split("; ") == [
        "in step 4 a gave it back: finished or aborted",
        "in step 5 b found this block in the cache, or it was loaded",
        "in step 5 a KV connector filled it",
        "in step 6 b gave it back: preempted",
    ]
    assert "Conclusion: look first at step 5: a KV connector filled it." in said


def test_weights_of_both_sides_are_named(tmp_path, capsys):
    about = {"epoch": 0, "label": "", "adapter": {"name": "acme", "content": "a6c1"}}
    weights = {"written": about, "present": about | {"epoch": 1, "label": "step-2"}}
    one = replace(finding("stale_weights", 4, "b", ("a", 2), 8), weights=weights)
    world = story(tmp_path, one)
    said = world.explained(capsys)
    texts = "epoch 0, adapter acme (a6c1)", "epoch 1 (step-2), adapter acme (a6c1)"
    assert f"Weights: it has {texts[0]}, and the request {texts[1]}." in said
    assert "Conclusion: look first at step 7: weights changed: epoch 0 to 1." in said


def test_a_request_that_was_never_given_the_block_is_named(tmp_path, capsys):
    world = story(tmp_path, finding("wrong_prefix", block=4, owner="c", step=8))
    assert (
        "Conclusion: by the scheduler's output b had this block in step 8, and c did "
        "not: the block table or the slots of c are wrong." in world.explained(capsys)
    )


def test_nothing_in_between_is_said_too(tmp_path, capsys):
    """A load that came before the last write is no cause."""
    world = story(tmp_path, finding(owner="b", writer=("b", 6), step=6))
    world.findings += [finding(step=8), finding(block=99, owner=None, writer=(None, 0))]
    world.step(9)
    said = world.explained(capsys)
    first, other = said.split("\n\n")[1:]
    assert "b reads it, and itself wrote it last, in step 6." in first
    assert "1 more findings of this class in this block" in first
    assert "Conclusion: no load, copy or zeroing of this block is recorded: " in first
    assert "History: no request had it in the steps of this file." in other
    assert "in step 7 weights changed: epoch 0 to 1" in other
    assert "Usual causes" in first
    assert "Usual causes" not in other


def test_what_the_file_does_not_reach_is_said(tmp_path, capsys):
    world = World(tmp_path, finding(owner="a", writer=("a", 1), step=NUM_STEPS + 9))
    world.step(1, [("a", [7], 0)])
    for number in range(2, NUM_STEPS + 10):
        world.step(number, (), [("a", None, number, False)])
    said = world.explained(capsys)
    assert (
        "itself wrote it last, in step 1, before those in this file (from 10)" in said
    )
    assert "a was given it in step 1, as block 0 of its table; still has it." in said
    known = "(loads, copies and weights are known from step 10 on): no other request"
    assert f"Since the last write {known}" in said


def test_causes_are_those_of_the_docs():
    text = Path(__file__).parents[2].joinpath("docs/audit.md").read_text()
    table = text.partition("| class | usually |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", table, re.MULTILINE)
    links = re.compile(r" \(\[below\]\([^)]*\)\)|\[([^]]*)\]\([^)]*\)")
    documented = {
        name: links.sub(r"\1", cause)
        for names, cause in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert documented == cases.CAUSES
    assert set(documented) == set(CLASSES)


def test_the_page_has_each_request_and_finding_and_escapes_names(tmp_path):
    world = story(tmp_path, finding(owner="<b>", step=6))
    world.recorder.found()
    out = tmp_path / "page.html"
    assert explain.main([str(world.path), "--html", str(out)]) == 0
    page = out.read_text()
    assert page.count("<rect") == 2
    assert page.count('class="mark"') == 5  # hit, load, weights, write, finding
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert not re.search("https?://|<script", page)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is damaged or incomplete: "),
        (b"\xff\xfe", "is damaged or incomplete: "),
        (b"[1]", "is not a file of VLLM_NWOR_AUDIT_INCIDENT that this version reads: "),
        (b'{"audit": "log"}', "its format is None; must be 'vllm-nwor incident 1'"),
        (b'{"format": "vllm-nwor incident 1"}', "missing required field `written`"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(content, why, tmp_path, capsys):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    assert explain.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{path} ")
    assert why in said


def test_it_needs_no_vllm(tmp_path):
    world = story(tmp_path, finding())
    world.recorder.found()
    code = (
        "import sys, runpy; sys.modules['vllm'] = None; "
        f"sys.argv[1:] = ['explain', {str(world.path)!r}]; "
        "runpy.run_module('vllm_nwor.audit', run_name='__main__')"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "1. changed in step 9" in done.stdout
