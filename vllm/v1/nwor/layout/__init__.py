# SPDX-License-Identifier: Apache-2.0
"""What the bytes of one slot are (`kv_layout`), how a probe proves it (`probe`), the
tables of layers that the ops take (`tables`), where shadow blocks lie (`regions`), and
what the hooks found out about a runner's caches (`caches`). No vLLM import."""
