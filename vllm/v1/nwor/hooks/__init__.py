# SPDX-License-Identifier: Apache-2.0
"""The only modules of this project that know vLLM's insides.

Each has a `LEDGER`: what it wraps, why, which signature it relies on, and when the
row can be deleted. Nothing here is imported unless NWOR is switched on.
"""
