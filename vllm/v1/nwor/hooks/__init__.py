# SPDX-License-Identifier: Apache-2.0
"""The only part that knows vLLM: imports it, wraps its functions, reads its objects.

`ledger` lists all that is touched: what, why, which signature is relied on, and when
the row can be deleted. `facts` lists what else is relied on, `backends` what is known
of attention backends by name, `versions` the releases of vLLM that were tried. In a
process of vLLM with NWOR off, nothing here is imported.
"""
