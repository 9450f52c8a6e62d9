# SPDX-License-Identifier: Apache-2.0
"""One server for the tests of a file of this folder that only send requests to it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.helpers.server import Server, serve

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}


ARGUMENTS = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]
# 5 % of them are shadow blocks for all sequences.
ARGUMENTS += ["--num-gpu-blocks-override", "320", "--block-size", "32"]
ARGUMENTS += ["--speculative-config", json.dumps(SPECULATION)]


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Of as many API servers as the file's NUM_API_SERVERS says, or one."""
    folder = tmp_path_factory.mktemp("server")
    count = getattr(request.module, "NUM_API_SERVERS", 1)
    arguments = (*ARGUMENTS, "--api-server-count", str(count))
    audit = {"VLLM_NWOR_AUDIT": "log"}
    with serve(folder, "stage", "smollm2-135m", *arguments, **audit) as running:
        yield running
