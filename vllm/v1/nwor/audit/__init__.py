# SPDX-License-Identifier: Apache-2.0
"""The KV audit: finds cache blocks that do not hold the text of their request.

It is an observer of a model runner's steps (`observer`), built by `build` when the
caches are bound. It never writes to vLLM's memory. `tables` has its tables, `state` the
operations of a step on them, `requests` the seats of requests, `outbox` what is on its
way to the host, `judge` the loads of KV connectors, `findings` the reports.
csrc/nwor/audit has the comparisons. `python -m vllm_nwor.audit --selftest` plants
`faults` in a real engine (`bench`) and checks that they are found. `incident` keeps the
last steps for a file that `explain` reads.

Its state is its own: it works without speculation, and with `VLLM_NWOR_MODE` off.
"""
