# SPDX-License-Identifier: Apache-2.0
"""Weight updates by frameworks' own code (tests/helpers/refit.py): the audit finds what
a kept prefix cache does, and the framework's own sequence is no finding.

`make frameworks` installs them next to the project's environment. Results go to
cases.jsonl in the folder of NWOR_REACH_RESULTS.
"""

from __future__ import annotations

import json
from importlib.metadata import distributions
from typing import Any

import pytest

from tests.helpers.environment import REPO, run_python
from tests.helpers.reach import CASES, save
from tests.helpers.refit import FRAMEWORKS

INSTALLED = REPO / ".venv-frameworks"

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def refit(name: str) -> dict[str, Any]:
    """`Found`, of a process of its own: frameworks patch vLLM."""
    if not any(distributions(name=name, path=[str(INSTALLED)])):
        pytest.skip(f"{name} is not installed: make frameworks")
    command = ("-W", "ignore", "-m", "tests.helpers.refit", name)
    done = run_python(*command, PYTHONPATH=str(INSTALLED))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_update_is_found_only_with_the_prefix_cache_kept(name: str) -> None:
    found = refit(name)
    assert found["changes_answer"]
    assert found["kept_is_wrong"]
    assert found["num_cached"] > 1
    assert found["kinds"] == ["stale_weights"] * found["num_cached"]
    assert found["epochs"] == [[0, 1]]
    assert found["num_own"] == 0
    assert found["own_is_right"]
    # The update of the same bytes is not among them.
    assert len(found["routes"]) == len(found["named"]) == 2
    key = {"framework": name, "case": "frameworks"}
    save(CASES, key, found, "make frameworks")
