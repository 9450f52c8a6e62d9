# SPDX-License-Identifier: Apache-2.0
"""bench_kernels.py: bad arguments, a small run, and no number when a byte is wrong."""

from __future__ import annotations

import json

import pytest

import bench_kernels
from vllm_nwor import ops

SMALL = ["--max-size", "8K", "--samples", "3"]


@pytest.fixture
def small_cache(monkeypatch):
    monkeypatch.setattr(bench_kernels, "CPU_CACHE_BYTES", 1 << 14)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "gpu"], "argument --device: invalid choice: 'gpu'"),
        (["--max-size", "4k"], "'4k' is not allowed; allowed values: 4096 or more"),
        (["--max-size", "3K"], "'3K' is not allowed; allowed values: 4096 or more"),
        (["--samples", "2"], "allowed values: whole numbers from 3"),
        (["--json", "/"], "'/' is not allowed; allowed values: a file name that ends"),
    ],
)
def test_bad_arguments_end_with_2(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err


def test_a_small_run(small_cache, tmp_path, capsys):
    path = tmp_path / "new" / "kernels.json"
    assert bench_kernels.main([*SMALL, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("device: cpu") < printed.index("check: ")
    assert printed.index("check: ") < printed.index("GB/s")
    written = json.loads(path.read_text())
    # To run again, without a folder of this machine.
    assert written["command"].endswith("--samples 3 --json kernels.json")
    results = written["results"]
    assert [(r["layout"], r["bytes"]) for r in results] == [
        *(("nhd", 4096), ("nhd", 8192), ("hnd", 4096), ("hnd", 8192)),
    ]
    for result in results:
        assert min(result["gb_per_s"][name] for name in ("copy", "log", "restore")) > 0
        for name in ("log", "restore"):
            median, low, high = result[f"{name}_of_copy"]
            assert 0 < low <= median <= high


def test_a_wrong_byte_leaves_no_number(small_cache, tmp_path, capsys, monkeypatch):
    ops.load()
    monkeypatch.setattr(ops, "restore_rejected_drafts", lambda *_: None)
    path = tmp_path / "kernels.json"
    assert bench_kernels.main([*SMALL, "--json", str(path)]) == 1
    printed = capsys.readouterr()
    assert "a rejected draft's bytes are not back (nhd," in printed.err
    assert "GB/s" not in printed.out
    assert not path.exists()
