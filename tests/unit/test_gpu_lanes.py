# SPDX-License-Identifier: Apache-2.0
"""Lanes of GPU steps, with a stand-in for tools/gpu_run.sh."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu import results
from tools.gpu import lanes as gpu_lanes

FAKE = """#!/usr/bin/env bash
echo "steps $*, GPUs $CUDA_VISIBLE_DEVICES, OUT ${OUT:-unset}"
case $1 in
hang) set -m
   (while true; do sleep 0.01; done) & echo $! >>"$2"
   setsid sleep 600 & echo $! >>"$2"
   wait ;;
fail) exit 3 ;;
meet) touch "$2"; until [ -e "$3" ]; do sleep 0.01; done
   taskset -cp $$ >"$NWOR_RESULTS/${2##*/}.txt" ;;
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


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["engines"], "expected GPUS: STEP"),
        (["a: engines"], "expected GPUS: STEP"),
        (["0: "], "expected GPUS: STEP"),
        (["0: x", "0,1: y"], "expected each in one lane"),
        ([f"{n}: x" for n in range(10_000)], "a processor each"),
    ],
)
def test_lanes_that_cannot_be_are_refused(lanes, capsys, texts, said):
    with pytest.raises(SystemExit) as ended:
        lanes(*texts)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two lanes need two processors"
)
def test_lanes_run_beside_each_other_on_processors_of_their_own(lanes, tmp_path):
    """Each waits until the other is there."""
    a, b = tmp_path / "a", tmp_path / "b"

    assert lanes(f"0: meet {a} {b}", f"1,2: meet {b} {a}") == 0

    log = (tmp_path / "logs" / "lane2.log").read_text()
    assert log == f"steps meet {b} {a}, GPUs 1,2, OUT unset\n"
    found = [(tmp_path / "results" / f"{n}.txt").read_text() for n in "ab"]
    cores = [text.rpartition(":")[2].strip() for text in found]
    assert cores[0] != cores[1]


def test_a_lane_that_fails_does_not_stop_the_others(lanes, tmp_path):
    a = tmp_path / "a"

    assert lanes("0: fail", f"1: meet {a} {a}") == 1

    assert (tmp_path / "results" / "a.txt").is_file()


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


@pytest.mark.parametrize("how", ["limit", "signal"])
def test_when_stopped_nothing_runs_on(how, lanes, tmp_path):
    pids = tmp_path / "pids"

    def stop():
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if how == "signal":
        threading.Thread(target=stop, daemon=True).start()

    status = lanes(f"1: hang {pids}", seconds=60 if how == "signal" else 3)

    assert status == 1
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    # What was killed may still be on its way out.
    deadline = time.monotonic() + 20
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, started))


def test_entries_that_are_saved_at_once_are_all_there(tmp_path, monkeypatch):
    monkeypatch.setenv(results.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(results.environment, "describe", lambda *_: {"packages": {}})

    def save(number: int) -> None:
        results.save("a.json", "k", "c", {f"engine {number}": {"n": number}})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(save, range(40)))

    found = json.loads((tmp_path / "a.json").read_text())["entries"]
    assert {entry["n"] for entry in found.values()} == set(range(40))
