# SPDX-License-Identifier: Apache-2.0
"""Tests on real engines on an NVIDIA GPU: bytes, outputs, synchronization, layouts.

Each engine runs in a process of its own (`process.py`), so that one that dies does not
end the others; the tests judge the processes' reports. Models are tiny and random;
acceptance comes from vLLM's synthetic rejection sampling. `make gpu-test` runs them;
without a GPU they are deselected.
"""
