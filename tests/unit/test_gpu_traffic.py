# SPDX-License-Identifier: Apache-2.0
"""traffic.py: reading ncu's table, and refusing what is not of these cases.

ncu itself is a script that writes what it is told to.
"""

import shlex

import pytest

from tools.gpu import traffic
from tools.results import render

HEAD = ["ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"]
CASES = [{"layout": "nhd", "bytes": 8192, "num_drafts": 2}]
KERNELS = ["log_kernel", "restore_kernel", "restore_kernel"]


def table(kernels, metrics=None):
    """As ncu prints it: a line a kernel and metric, with its own lines in between."""
    lines = ["==PROF== Connected to process 7", HEAD]
    for number, kernel in enumerate(kernels):
        for place, metric in enumerate(metrics or traffic.METRICS.values()):
            value = f"{8000 + 10 * number + place:,}"
            lines.append([str(number), kernel, metric, "byte", value])
    return [
        line if isinstance(line, str) else ",".join(f'"{cell}"' for cell in line)
        for line in lines
    ]


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Makes an ncu that leaves these lines in its log and ends with this status."""
    monkeypatch.setattr(traffic, "run_cases", lambda: CASES)
    monkeypatch.setattr(
        traffic.environment,
        "describe",
        lambda *_: {"date": "2026-01-02", "gpu": "a GPU", "commit": "abc"},
    )

    def make(lines, status=0):
        (tmp_path / "lines").write_text("\n".join(lines))
        script = tmp_path / "ncu"
        script.write_text(
            '#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\n'
            f'cp {shlex.quote(str(tmp_path / "lines"))} "$2"\nexit {status}\n'
        )
        script.chmod(0o755)
        found = tmp_path / "gpu_traffic.json"
        arguments = ["--ncu", str(script), "--json", str(found)]
        return traffic.main(arguments), found

    return make


def test_each_kernel_has_its_counts_beside_the_arithmetic(ncu):
    status, path = ncu(table(KERNELS))

    assert status == 0
    found = render.load(path, kind="gpu_traffic")
    assert [row["operation"] for row in found["rows"]] == [
        "log",
        "restore, all rejected",
        "restore, none rejected",
    ]
    assert [row["expected"]["read"] for row in found["rows"]] == [8192, 8192, 0]
    assert found["rows"][1]["counts"] == {
        "read": 8010,
        "written": 8011,
        "memory_read": 8012,
        "memory_written": 8013,
    }


@pytest.mark.parametrize(
    ("lines", "status", "named"),
    [
        (table(KERNELS[:2]), 0, "expected log and two restores"),
        (table(KERNELS[::-1]), 0, "expected log and two restores"),
        (table(KERNELS, ["dram__bytes_read.sum"]), 0, "ncu has no"),
        (["==ERROR== ERR_NVGPUCTRPERM: no permission"], 0, "ERR_NVGPUCTRPERM"),
        (["==ERROR== it failed"], 1, "it failed"),
    ],
)
def test_counts_of_something_else_are_refused(ncu, capsys, lines, status, named):
    exit_status, path = ncu(lines, status)

    assert exit_status == 1
    assert named in capsys.readouterr().err
    assert not path.exists()


def test_without_ncu_it_says_so(tmp_path, capsys):
    missing = str(tmp_path / "none")
    arguments = ["--ncu", missing, "--json", str(tmp_path / "a.json")]

    assert traffic.main(arguments) == 1
    assert f"No such file or directory: '{missing}'" in capsys.readouterr().err
