# SPDX-License-Identifier: Apache-2.0
"""bench_kernels.py: a small run, and no number when a byte is wrong."""

from __future__ import annotations

import json

import pytest

import bench_kernels
from vllm_nwor import ops

SMALL = ["--max-kib", "8", "--samples", "3"]


@pytest.fixture
def small_cache(monkeypatch):
    monkeypatch.setattr(bench_kernels, "CPU_CACHE_BYTES", 1 << 14)


def test_a_small_run(small_cache, tmp_path, capsys):
    path = tmp_path / "kernels.json"
    assert bench_kernels.main([*SMALL, "--json", str(path)]) == 0
    assert "hnd, 8192 bytes: checked" in capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    assert [(r["layout"], r["bytes"]) for r in results] == [
        *(("nhd", 4096), ("nhd", 8192), ("hnd", 4096), ("hnd", 8192)),
    ]


def test_a_wrong_byte_leaves_no_number(small_cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ops, "restore_rejected_drafts", lambda *_: None)
    path = tmp_path / "kernels.json"
    assert bench_kernels.main([*SMALL, "--json", str(path)]) == 1
    printed = capsys.readouterr()
    assert "a rejected draft's bytes are not back (nhd," in printed.err
    assert "GB/s" not in printed.out
    assert not path.exists()


def test_rates_are_beside_the_copys():
    """2 MiB in 2 ms are 1.05 GB/s; the log takes twice as long in the median sample."""
    times = {"copy": [1e-3, 2e-3, 2e-3], "log": [4e-3] * 3, "restore": [2e-3] * 3}
    found = bench_kernels.statistics_of(times, num_bytes=1 << 20)
    rates = {"copy": 1.048576, "log": 0.524288, "restore": 1.048576}
    assert found["gb_per_s"] == pytest.approx(rates)
    assert found["log_of_copy"] == pytest.approx([0.5, 0.3, 0.5])
    assert found["restore_of_copy"] == pytest.approx([1.0, 0.6, 1.0])
