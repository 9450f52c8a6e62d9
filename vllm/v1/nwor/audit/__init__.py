# SPDX-License-Identifier: Apache-2.0
"""The KV audit: finds cache blocks that do not hold what their requests believe.

It reads caches and tables, and writes to nothing of vLLM's. `tables` has what is kept,
`state` what a step does with it, `requests` who has which seat, `findings` what is said
of a finding, `startup` where an engine's audit comes from, `runner` what NWOR's hooks
of both runners call; that one, `offloading` and `stats` have hooks of their own;
csrc/nwor/audit_rules.h has what is compared, and how.
`python -m vllm_nwor.audit --selftest` plants `faults` and looks whether they are found.

Its state is its own: it works without speculation, and with `VLLM_NWOR_MODE` off.
"""
