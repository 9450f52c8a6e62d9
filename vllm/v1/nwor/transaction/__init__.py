# SPDX-License-Identifier: Apache-2.0
"""The transaction: an observer of a model runner's steps (`observer`), built by `build`
when the caches are bound. `draft_manager` says what commit guarantees, `states` which
states there are and what holds in them; `undo_log` and `shadow_blocks` are the two ways
to undo; `counters` is what a step reports."""
