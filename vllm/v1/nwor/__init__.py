# SPDX-License-Identifier: Apache-2.0
"""NWOR (No-Write-On-Reject): a transactional KV cache for speculative decoding.

Installed as `vllm_nwor`, or as `vllm.v1.nwor` in a fork of vLLM that carries this
folder; all imports inside are relative. vLLM loads it through the entry point
`vllm.general_plugins`; users switch it on with `VLLM_NWOR_MODE`. Importing it imports
neither torch nor vLLM, and touches no device.

Where to look: `config` for modes and variables, `layout.kv_layout` for one slot's
bytes, `transaction.draft_manager` for the guarantees of commit, `hooks.ledger` for
everything that NWOR touches in vLLM, `step` for the moments of one step. Other plugins
may use `on_commit` and `kv_versions`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commits import Commit, KvVersionSpan, kv_versions, on_commit
    from .transaction.draft_manager import DraftCommitManager

__version__ = "0.1.0"
__all__ = [
    "Commit",
    "DraftCommitManager",
    "KvVersionSpan",
    "__version__",
    "kv_versions",
    "on_commit",
]

_LAZY = {
    "Commit": "commits",
    "KvVersionSpan": "commits",
    "kv_versions": "commits",
    "on_commit": "commits",
    "DraftCommitManager": "transaction.draft_manager",
}


def __getattr__(name: str) -> Any:
    """Imports the public names of other modules on first use."""
    if name in _LAZY:
        from importlib import import_module

        from .plugin import used_package

        return getattr(import_module(f"{used_package()}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
