"""Changes names in an engine's module, completely or not at all.

A wrapper without a plugin point relies on names and signatures of the engine. It checks all of them before it changes
any. If one differs, the engine runs unchanged, and a warning says what differs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ._telling import Teller

Change = Callable[[ModuleType], None]


class Unknown(Exception):
    """Something in the engine differs from the known releases. The text says what."""


def guarded(tell: Teller, change: Change) -> Change:
    """Wraps a change for :func:`laxity._after_import.after_import`: it is made once per module, and raises nothing. The
    change checks everything first."""

    @functools.wraps(change)
    def changed(module: ModuleType) -> None:
        if getattr(module, "_laxity", False):
            return
        try:
            change(module)
            module._laxity = True  # type: ignore[attr-defined]
        except Unknown as unknown:
            tell.count(f"{module.__name__} is not as it is known: {unknown}", "it runs unchanged")
        except Exception as broken:
            tell.count(f"{module.__name__} could not be changed: {broken!r}", "it may run unchanged", exc_info=True)

    return changed


def class_of(module: Any, name: str) -> Any:
    """The class with this name. Raises :class:`Unknown`."""
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise Unknown(f"it has no class {name}")
    return found


def takes(function: Any, names: list[str], *, exactly: bool = False) -> None:
    """Checks that the first parameters of a function have these names. Raises :class:`Unknown`."""
    if not callable(function):
        raise Unknown(f"there is no method with ({', '.join(names)})")
    there = list(inspect.signature(function).parameters)
    if there[: len(names)] != names or (exactly and len(there) > len(names)):
        raise Unknown(
            f"{function.__qualname__} takes ({', '.join(there)}); known is ({', '.join(names)}{'' if exactly else ', …'})"
        )
