# SPDX-License-Identifier: Apache-2.0
"""Lanes of GPU steps: who gets what, who waits, what is kept; with a stand-in for
tools/gpu_run.sh."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.gpu import results
from tools.gpu import lanes as gpu_lanes

FAKE = """#!/usr/bin/env bash
echo "steps $*, GPUs $CUDA_VISIBLE_DEVICES, OUT ${OUT:-unset}"
mkdir -p "$NWOR_RESULTS"
case $1 in
hang) set -m
   (while true; do sleep 0.01; done) & echo $! >>"$2"
   setsid sleep 600 & echo $! >>"$2"
   wait ;;
fail) exit 3 ;;
*) date +%s.%N >"$2"; sleep 0.5
   echo '{"command": "c"}' >"$NWOR_RESULTS/$1.json"; date +%s.%N >>"$2" ;;
esac
"""


@pytest.fixture
def lanes(tmp_path, monkeypatch):
    script = tmp_path / "gpu_run.sh"
    script.write_text(FAKE)
    script.chmod(0o755)
    monkeypatch.setattr(gpu_lanes, "RUN", script)
    monkeypatch.setenv("OUT", "elsewhere")
    before = signal.getsignal(signal.SIGTERM)

    def run(*texts, seconds=60):
        argv = [*texts, "--results", str(tmp_path / "results")]
        argv += ["--logs", str(tmp_path / "logs"), "--seconds", str(seconds)]
        return gpu_lanes.main(argv)

    yield run
    signal.signal(signal.SIGTERM, before)


def times(path: Path) -> tuple[float, float]:
    began, ended = path.read_text().split()
    return float(began), float(ended)


def test_lanes_run_on_the_processors_of_their_gpus():
    planned = gpu_lanes.plan(
        ["0: engines a", "1: soak 5", "3: bench", "0,1: parallel"], list(range(7))
    )

    assert [lane.cores for lane in planned] == [(0, 1), (2, 3), (4, 5), (0, 1, 2, 3)]
    assert [lane.after for lane in planned] == [(), (), (), (1, 2)]
    assert planned[0].steps == ("engines", "a")
    assert planned[3].gpus == (0, 1)


def test_lanes_that_wait_for_the_same_lane_share_its_processors():
    _, one, other = gpu_lanes.plan(["0,1: a", "0: b", "1: c"], list(range(8)))

    assert one.after == other.after == (1,)
    assert (one.cores, other.cores) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("text", ["engines", ": engines", "a: engines", "-1: x", "0: "])
def test_a_lane_that_cannot_be_read_is_named(text):
    with pytest.raises(ValueError, match="expected GPUS: STEP"):
        gpu_lanes.plan([text], [0])


def test_more_lanes_than_processors_are_refused(lanes, capsys):
    with pytest.raises(SystemExit) as exit_info:
        lanes(*(f"{n}: x" for n in range(len(os.sched_getaffinity(0)) + 1)))

    assert exit_info.value.code == 2
    assert "at least one processor for each" in capsys.readouterr().err


def test_lanes_run_beside_each_other_and_results_come_together(lanes, tmp_path):
    status = lanes(f"0: a {tmp_path / 'a'}", f"1: b {tmp_path / 'b'}")

    assert status == 0
    a, b = times(tmp_path / "a"), times(tmp_path / "b")
    assert a[0] < b[1]
    assert b[0] < a[1]
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == [
        "a.json",
        "b.json",
    ]
    log = (tmp_path / "logs" / "lane2.log").read_text()
    assert log == f"steps b {tmp_path / 'b'}, GPUs 1, OUT unset\n"


def test_a_lane_waits_for_its_gpus(lanes, tmp_path):
    assert lanes(f"0: a {tmp_path / 'a'}", f"0,1: b {tmp_path / 'b'}") == 0

    assert times(tmp_path / "a")[1] <= times(tmp_path / "b")[0]


def test_a_lane_that_fails_does_not_stop_the_others(lanes, tmp_path):
    assert lanes("0: fail", f"0: b {tmp_path / 'b'}") == 1

    assert (tmp_path / "results" / "b.json").is_file()


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


@pytest.mark.parametrize("how", ["limit", "signal"])
def test_when_stopped_nothing_runs_on_and_what_there_is_is_kept(how, lanes, tmp_path):
    pids = tmp_path / "pids"
    texts = [f"0: a {tmp_path / 'a'}", f"1: hang {pids}", f"1: c {tmp_path / 'c'}"]
    if how == "signal":
        timer = threading.Timer(4, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()

    status = lanes(*texts, seconds=60 if how == "signal" else 4)

    assert status == 1
    assert (tmp_path / "results" / "a.json").is_file()
    assert not (tmp_path / "c").exists()
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    assert not any(map(is_running, started))


def test_of_two_entries_the_newer_stays(tmp_path):
    def file(folder, **dates):
        entries = {
            name: {"environment": {"date": date}} for name, date in dates.items()
        }
        (tmp_path / folder).mkdir(exist_ok=True)
        content = json.dumps({"kind": "k", "schema": 1, "entries": entries})
        (tmp_path / folder / "gpu.json").write_text(content)
        return tmp_path / folder

    to = file("to", a="2026-01-01 10:00 UTC", b="2026-01-03 10:00 UTC")
    one = file("one", a="2026-01-02 10:00 UTC", b="2026-01-02 10:00 UTC")
    two = file("two", c="2026-01-01 10:00 UTC")
    (two / "plot.png").write_bytes(b"png")
    (two / ".gpu-x1y2.json").write_text('{"entr')
    (two / "folder").mkdir()

    assert results.merge([one, two], to) == ["gpu.json", "plot.png"]

    found = json.loads((to / "gpu.json").read_text())["entries"]
    days = {name: entry["environment"]["date"][9] for name, entry in found.items()}
    assert days == {"a": "2", "b": "3", "c": "1"}
    assert (to / "plot.png").read_bytes() == b"png"
