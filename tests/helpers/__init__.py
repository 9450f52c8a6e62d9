# SPDX-License-Identifier: Apache-2.0
"""What several tests share: engines in process, byte oracles, scripted drafters.

Nothing here reads the package under test to learn how a cache is laid out or which
drafts were rejected: both are worked out again, from vLLM alone, so that a mistake in
the package cannot hide in its own proof.
"""
