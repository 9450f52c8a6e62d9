# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_vllm.py, one noun a file, and what renders its and other results.
Not installed with the package; nothing in `vllm_nwor` imports it."""
