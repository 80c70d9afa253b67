"""How the wrappers of engines say hints: never at the cost of the engine.

A hint that :mod:`laxity` refuses is a bug of a wrapper, or an engine that works otherwise than it did; either
way the transfer goes on. So every call of a wrapper goes through a :class:`Teller`: it counts what was refused,
logs the first of each kind, and raises nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Optional, TypeVar

import laxity

T = TypeVar("T")

#: Kinds that are told apart in :attr:`Teller.counts`; the rest counts as one.
KINDS_MAX = 64


class Teller:
    """Calls hints for one wrapper. Safe from any thread."""

    def __init__(self, who: str) -> None:
        self._log = logging.getLogger(f"laxity.{who}")
        self._lock = threading.Lock()
        #: What went wrong, how often.
        self.counts: dict[str, int] = {}

    def __call__(self, hint: Callable[..., T], *args: Any, **kwargs: Any) -> Optional[T]:
        """``hint(...)``, or ``None`` if it was refused."""
        try:
            return hint(*args, **kwargs)
        except laxity.HintError as refused:
            self.count(f"{_name(hint)}: {type(refused).__name__}", str(refused))
        except Exception as broken:
            self.count(f"{_name(hint)}: {type(broken).__name__}", repr(broken), exc_info=True)
        return None

    def count(self, what: str, why: str = "", *, exc_info: bool = False) -> None:
        """Counts an oddity, and logs the first of its kind."""
        with self._lock:
            if what not in self.counts and len(self.counts) >= KINDS_MAX:
                what = "other"
            first = what not in self.counts
            self.counts[what] = self.counts.get(what, 0) + 1
        if first:
            text = "%s%s; transfers go on, further ones are only counted"
            self._log.warning(text, what, f" ({why})" if why else "", exc_info=exc_info)

    def scope(self, **what: Any) -> "QuietScope":
        """:class:`laxity.scope`, which is left out if it makes no sense."""
        return QuietScope(self(laxity.scope, **what), self)


class QuietScope:
    """A scope that raises nothing of its own, and passes on what the code within it raises."""

    __slots__ = ("_scope", "_tell")

    def __init__(self, scope: Any, tell: Teller) -> None:
        self._scope = scope
        self._tell = tell

    def __enter__(self) -> "QuietScope":
        if self._scope is not None and self._tell(self._scope.__enter__) is None:
            self._scope = None
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._scope is not None:
            self._tell(self._scope.__exit__, None, None, None)


def _name(hint: Callable[..., Any]) -> str:
    return getattr(hint, "__name__", type(hint).__name__)
