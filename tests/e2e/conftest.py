# SPDX-License-Identifier: Apache-2.0
"""One server for all tests of this folder that only send requests to it."""

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


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    audit = {"VLLM_NWOR_AUDIT": "log"}
    with serve(folder, "stage", "smollm2-135m", *ARGUMENTS, **audit) as running:
        yield running
