#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes that log and restore move, counted by the GPU itself, through Nsight Compute.

    python tools/gpu/traffic.py --json results/gpu_traffic.json

Runs one log, one restore of which every draft was rejected and one of which none was,
in each layout and size, under `ncu`, which replays each with cold caches. Beside what
the arithmetic says are the bytes that the kernel's multiprocessors read from and wrote
to the L2 cache, and those that L2 exchanged with the memory. The former count what the
kernel does; the latter are fewer written bytes where they stay in L2.

Exit status: 0 done; 1 ncu or the GPU's counters cannot be used; 2 a bad argument.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import environment  # noqa: E402
from benchmarks.files import write_json  # noqa: E402

NCU = "/usr/local/cuda/bin/ncu"
# Our name of a count -> the metric of ncu, all in bytes.
METRICS = {
    "read": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "written": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "memory_read": "dram__bytes_read.sum",
    "memory_written": "dram__bytes_write.sum",
}
LAYOUTS = ("nhd", "hnd")
SIZES = (1 << 19, 1 << 23, 1 << 25)
# What a kernel is called, and what it is asked to do, in the order of a case.
OPERATIONS = (
    ("log_kernel", "log"),
    ("restore_kernel", "restore, all rejected"),
    ("restore_kernel", "restore, none rejected"),
)


class CountersUnavailable(RuntimeError):
    """ncu is not there, or was not allowed to count."""


def read_csv(lines: Iterable[str]) -> list[tuple[str, dict[str, int]]]:
    """The kernels in ncu's table of metrics (--csv --print-units base), in order: name
    and bytes, by METRICS' names."""
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    names = {metric: name for name, metric in METRICS.items()}
    found: dict[str, tuple[str, dict[str, int]]] = {}
    for row in table:
        _, counts = found.setdefault(row["ID"], (row["Kernel Name"], {}))
        value = row["Metric Value"].replace(",", "")
        counts[names[row["Metric Name"]]] = round(float(value))
    for kernel, counts in found.values():
        if missing := METRICS.keys() - counts.keys():
            raise CountersUnavailable(f"ncu has no {sorted(missing)} of {kernel}")
    return list(found.values())


def run_cases() -> list[dict[str, Any]]:
    """What ncu watches: one of each operation, for each layout and size."""
    import torch
    from benchmarks import kernel_cases

    from vllm_nwor import ops

    ops.load("cuda")
    device = torch.device("cuda")
    cases = []
    for layout in LAYOUTS:
        for size in SIZES:
            made = kernel_cases.layout(layout)
            case = kernel_cases.Case(made, size, device, cache_bytes=0, seed=0)
            case.check()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            case.call("log", 0)
            case.call("restore", 0)
            case.sets[0].num_rejected.zero_()
            case.call("restore", 0)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            about = {"layout": layout, "bytes": case.num_bytes}
            cases.append({**about, "num_drafts": case.num_drafts})
    return cases


def measure(ncu: str) -> list[tuple[str, dict[str, int]]]:
    """Runs this program's cases under ncu. Raises CountersUnavailable."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *(ncu, "--csv", "--print-units", "base", "--log-file", str(log)),
            *("--profile-from-start", "off", "--metrics", ",".join(METRICS.values())),
            *("--kernel-name", "regex:^(log|restore)_kernel$"),
            *("--print-kernel-base", "function"),
            *(sys.executable, __file__, "--cases"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = log.read_text(encoding="utf-8") if log.is_file() else ""
    if done.returncode != 0 or "ERR_" in text:
        shown = (text + done.stdout + done.stderr).strip().splitlines()
        raise CountersUnavailable("\n".join(shown[-15:]))
    return read_csv(text.splitlines())


def combine(
    cases: Sequence[dict[str, Any]], kernels: Sequence[tuple[str, dict[str, int]]]
) -> list[dict[str, Any]]:
    """A row for each kernel: what it was to do, and what it moved; tables and slot ids
    come on top of the bytes expected.

    Raises:
        CountersUnavailable: they are not the kernels of these cases.
    """
    wanted = [(case, *one) for case in cases for one in OPERATIONS]
    found = [name for name, _ in kernels]
    if found != [name for _, name, _ in wanted]:
        raise CountersUnavailable(
            f"ncu saw {found}; expected log and two restores for each of {len(cases)} "
            "cases"
        )
    rows = []
    for (case, _, operation), (_, counts) in zip(wanted, kernels, strict=True):
        moved = 0 if operation.endswith("none rejected") else case["bytes"]
        expected = {"read": moved, "written": moved}
        about = {"operation": operation, "expected": expected, "counts": counts}
        rows.append(case | about)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_traffic.json"))
    parser.add_argument("--ncu", default=shutil.which("ncu") or NCU)
    parser.add_argument("--cases", action="store_true", help="without ncu and results")
    arguments = parser.parse_args(argv)
    if arguments.cases:
        run_cases()
        return 0
    try:
        kernels = measure(arguments.ncu)
        rows = combine(run_cases(), kernels)
    except (CountersUnavailable, OSError) as error:
        print(f"traffic.py: {error}", file=sys.stderr)
        return 1
    result = {
        "kind": "gpu_traffic",
        "command": f"python tools/gpu/traffic.py --json {arguments.json.name}",
        "environment": environment.describe("cuda", ROOT),
        "rows": rows,
    }
    write_json(arguments.json, result)
    for row in rows:
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
