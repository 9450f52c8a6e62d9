# SPDX-License-Identifier: Apache-2.0
"""The KV audit: finds cache blocks that do not hold what their requests believe.

It is an observer of a model runner's steps (`observer`), built by `build` when the
caches are bound, and it writes to nothing of vLLM's. `tables` has what is kept, `state`
what a step does with it, `requests` who has which seat, `findings` how a finding is
reported. csrc/nwor/audit has what is compared, and how.
`python -m vllm_nwor.audit --selftest` plants `faults` in a real engine (`bench`) and
looks whether they are found.

Its state is its own: it works without speculation, and with `VLLM_NWOR_MODE` off.
"""
