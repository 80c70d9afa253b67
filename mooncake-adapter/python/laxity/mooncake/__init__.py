"""Mooncake under Laxity: in place of ``mooncake.engine`` and ``mooncake.store``, with the same names.

    from laxity.mooncake import TransferEngine  # instead of: from mooncake.engine import TransferEngine

Where Laxity cannot intercept what Mooncake sends (its TCP transport, and RDMA without ``liblaxity.so``),
transfers ask for leave to send before they are handed to Mooncake, in pieces. Where it can, Mooncake gets
every transfer at once, and Laxity is only told what it belongs to. Either way what a transfer belongs to comes from
the open :func:`laxity.scope` of the calling thread, then from the memory tables (:func:`laxity.memory_layer`,
:func:`laxity.memory_owner`); a write is P2D and a read KV_REUSE if nothing says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._engine import TransferEngine as TransferEngine
    from ._store import MooncakeDistributedStore as MooncakeDistributedStore

_OURS = {"TransferEngine": "_engine", "MooncakeDistributedStore": "_store"}


def __getattr__(name: str) -> Any:
    """Mooncake is imported when it is first asked for something: engine and store may be used without each
    other. What is not wrapped here comes from there."""
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
