# SPDX-License-Identifier: Apache-2.0
"""bench_kernels.py: a small run, and no number when a byte is wrong."""

from __future__ import annotations

import json

import pytest

import bench_kernels
from vllm_nwor import ops


@pytest.mark.parametrize("restores", [True, False])
def test_a_small_run_and_a_wrong_byte_that_leaves_no_number(
    restores, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(bench_kernels, "CPU_CACHE_BYTES", 1 << 14)
    if not restores:
        monkeypatch.setattr(ops, "restore_rejected_drafts", lambda *_: None)
    path = tmp_path / "kernels.json"
    words = ["--max-kib", "8", "--samples", "3", "--json", str(path)]
    assert bench_kernels.main(words) == (0 if restores else 1)
    printed = capsys.readouterr()
    assert path.exists() is ("GB/s" in printed.out) is restores
    if restores:
        results = json.loads(path.read_text())["results"]
        assert [(r["layout"], r["bytes"]) for r in results] == [
            *(("nhd", 4096), ("nhd", 8192), ("hnd", 4096), ("hnd", 8192)),
        ]
    else:
        assert "a rejected draft's bytes are not back (nhd," in printed.err


def test_rates_are_beside_the_copys():
    """2 MiB in 2 ms are 1.05 GB/s; the log takes twice as long in the median sample."""
    times = {"copy": [1e-3, 2e-3, 2e-3], "log": [4e-3] * 3, "restore": [2e-3] * 3}
    found = bench_kernels.statistics_of(times, num_bytes=1 << 20)
    rates = {"copy": 1.048576, "log": 0.524288, "restore": 1.048576}
    assert found["gb_per_s"] == pytest.approx(rates)
    assert found["log_of_copy"] == pytest.approx([0.5, 0.3, 0.5])
    assert found["restore_of_copy"] == pytest.approx([1.0, 0.6, 1.0])
