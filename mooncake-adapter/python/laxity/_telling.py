"""Calls hints for the wrappers of engines, so that no error of a hint reaches the engine.

:mod:`laxity` refuses a hint if a wrapper has a bug, or if the engine changed. The transfer goes on in both cases. So
every call of a wrapper goes through a :class:`Teller`. It counts what was refused, logs the first of each kind, and
raises nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Optional, TypeVar

import laxity

T = TypeVar("T")

#: Maximum number of kinds in :attr:`Teller.counts`. Further kinds are counted together.
KINDS_MAX = 64


class Teller:
    """Calls hints for one wrapper. Safe from any thread."""

    def __init__(self, who: str) -> None:
        self._log = logging.getLogger(f"laxity.{who}")
        self._lock = threading.Lock()
        #: How often each kind of problem occurred.
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
        """Counts a problem, and logs the first of its kind."""
        with self._lock:
            if what not in self.counts and len(self.counts) >= KINDS_MAX:
                what = "other"
            first = what not in self.counts
            self.counts[what] = self.counts.get(what, 0) + 1
        if first:
            text = "%s%s; transfers go on, further ones are only counted"
            self._log.warning(text, what, f" ({why})" if why else "", exc_info=exc_info)

    def scope(self, **what: Any) -> "QuietScope":
        """A :class:`laxity.scope`. If its arguments are invalid, the scope has no effect."""
        return QuietScope(self(laxity.scope, **what), self)


class QuietScope:
    """A scope that raises no errors of hints. Exceptions of the code within it pass through."""

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
