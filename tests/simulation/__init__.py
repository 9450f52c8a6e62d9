# SPDX-License-Identifier: Apache-2.0
"""A seeded simulation of vLLM's paged KV cache around the real manager and CPU ops.

    cache       one allocation with caches of several layouts, and its plain model
    blocks      vLLM's side: requests, block pool, prefix cache
    step        a batch's rows, and what vLLM's tensors say about them
    seats       the rule by which shadow rows are not copied anew, and its own model
    engine      the manager around each step, with faults planted, and all checks
    simulator   what can happen, drawn from a seed, and lets it happen

`python -m tests.simulation --help` runs and replays it. The real parts under test are
DraftCommitManager, ShadowBlocks, Step, KVLayout, Report, NworStats and
the native CPU ops. Not simulated: attention, threads, a device behind the host.
"""
