# SPDX-License-Identifier: Apache-2.0
"""The only modules of this project that know vLLM's insides.

Those that wrap have a `LEDGER`: what, why, which signature is relied on, and when the
row can be deleted. `facts` has what else is relied on. Nothing here is imported unless
NWOR is switched on, or somebody asks whether a vLLM fits (`source`).
"""
