# SPDX-License-Identifier: Apache-2.0
"""Shared by several tests: engines in this process, byte oracles, scripted drafters.

Cache layouts and rejected drafts are derived from vLLM alone, never from the package
under test, so that its mistakes cannot hide.
"""
