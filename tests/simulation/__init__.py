# SPDX-License-Identifier: Apache-2.0
"""A seeded simulation of vLLM's paged KV cache around the real manager and CPU ops.

    cache       one allocation with caches of several layouts, and its plain model
    blocks      vLLM's side: requests, block pool, prefix cache
    step        a batch's rows, and vLLM's tensors for them
    engine      the manager around each step, with injected faults, and all checks
    simulator   draws operations from a seed, and plays them

`python -m tests.simulation --help` runs and replays it. The real parts under test are
DraftCommitManager, ShadowBlocks, Step, KVLayout, Report, NworStats and
the native CPU ops. Not simulated: attention, threads, a device behind the host.
"""
