# SPDX-License-Identifier: Apache-2.0
"""The bytes of one slot (`kv_layout`), the probe that proves them (`probe`), the tables
of layers that the ops take (`tables`), the location of shadow blocks (`regions`), and a
description of a runner's caches, made by the hooks (`caches`). No vLLM import."""
