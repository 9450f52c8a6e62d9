# SPDX-License-Identifier: Apache-2.0
"""A seeded simulation of vLLM's paged KV cache around the real manager and CPU ops.

    memory      one allocation with caches of several layouts, and its plain models
    blocks      vLLM's side: requests, block pool, prefix cache
    faults      the op module with faults planted in it
    operations  what can happen, drawn from a seed
    simulator   lets it happen, and checks the guarantees at each step
    shrink      cuts a failing run down to a few operations
    seats       the rule by which shadow rows are not copied anew, without tensors

`python -m tests.simulation --help` runs and replays it. The real parts under test are
DraftCommitManager, ShadowPages, VerificationWindows, KVLayout, Report, NworStats and
the native CPU ops. Not simulated: attention, threads, a device behind the host.
"""
