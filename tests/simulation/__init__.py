# SPDX-License-Identifier: Apache-2.0
"""A seeded simulation of vLLM's paged KV cache around the real manager and CPU ops.

    cache       one allocation with caches of several layouts, and its plain models
    blocks      vLLM's side: requests, block pool, prefix cache
    step        a batch's rows, and what vLLM's tensors say about them
    operations  what can happen, drawn from a seed, and cut down when it fails
    engine      the manager around each step, with faults planted, and all checks
    simulator   lets operations happen
    seats       the rule by which shadow rows are not copied anew, in an engine's place

`python -m tests.simulation --help` runs and replays it. The real parts under test are
DraftCommitManager, ShadowBlocks, VerificationWindows, KVLayout, Report, NworStats and
the native CPU ops. Not simulated: attention, threads, a device behind the host.
"""
