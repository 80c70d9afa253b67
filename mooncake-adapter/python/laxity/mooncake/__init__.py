"""Mooncake under Laxity. This module replaces ``mooncake.engine`` and ``mooncake.store`` and has the same names.

    from laxity.mooncake import TransferEngine  # instead of: from mooncake.engine import TransferEngine

Laxity cannot intercept Mooncake's TCP transport, nor RDMA without ``liblaxity.so``. There each transfer asks for
permits, and Mooncake gets it in the pieces that are permitted. Elsewhere Mooncake gets every transfer at once, and
this module only gives the hints. In both cases the stage, layer and request of a transfer come from the open
:func:`laxity.scope` of the calling thread, else from the memory tables (:func:`laxity.memory_layer`,
:func:`laxity.memory_owner`). Without these a write is P2D and a read is KV_REUSE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._engine import TransferEngine as TransferEngine
    from ._store import MooncakeDistributedStore as MooncakeDistributedStore

_OURS = {"TransferEngine": "_engine", "MooncakeDistributedStore": "_store"}


def __getattr__(name: str) -> Any:
    """Imports Mooncake on first use, because a program may have only its engine or only its store. Names that are not
    wrapped here come from Mooncake."""
    import importlib

    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OURS:
        value = getattr(importlib.import_module("." + _OURS[name], __name__), name)
        globals()[name] = value
        return value
    for module in ("mooncake.engine", "mooncake.store"):
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            continue
    raise AttributeError(f"neither {__name__!r}, mooncake.engine nor mooncake.store has {name!r}")
