# SPDX-License-Identifier: Apache-2.0
"""Proofs on real engines on an NVIDIA GPU: bytes, outputs, synchronisation, layouts.

Every engine runs in a process of its own (`process.py`), so that one that dies says so
and the others go on; the tests judge what those processes wrote down. All models are
tiny, made on the spot and random; acceptance comes from vLLM's synthetic rejection
sampling. `make gpu-test` runs them; without a GPU they are deselected.
"""
