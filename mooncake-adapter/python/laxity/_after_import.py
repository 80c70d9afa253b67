"""Calls a function with a module when that module is imported, or at once if it already is.

The wrappers change engines that are imported later, or never. The package ``wrapt`` can do the same. The wheel has no
dependencies, because engines pin theirs and the wheel is installed beside them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Optional

Then = Callable[[ModuleType], Any]

_lock = threading.RLock()
_waiting: dict[str, list[Then]] = {}
#: Modules whose import had begun, but not ended, when :func:`after_import` was called.
_begun: dict[str, ModuleType] = {}
_looking = threading.local()


def after_import(name: str, then: Then) -> None:
    """Calls ``then(module)`` once, as soon as the module ``name`` is imported. ``then`` must not raise, because the
    exception would reach the code that imports the module."""
    with _lock:
        module = sys.modules.get(name)
        if module is not None and not _initializing(module):
            ready: Optional[ModuleType] = module
        else:
            ready = None
            _waiting.setdefault(name, []).append(then)
            if module is not None:
                _begun[name] = module
            if _FINDER not in sys.meta_path:
                sys.meta_path.insert(0, _FINDER)
    if ready is not None:
        then(ready)


def _initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _finished() -> None:
    """Serves the modules in ``_begun`` whose import has ended. Every later import calls this."""
    with _lock:
        done = [name for name, module in _begun.items() if not _initializing(module)]
        ready = [(_begun.pop(name), _waiting.pop(name, [])) for name in done]
    for module, waited in ready:
        for then in waited:
            then(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module as Python would, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if _begun:
            _finished()
        if fullname not in _waiting or getattr(_looking, "name", None) == fullname:
            return None
        before = getattr(_looking, "name", None)
        _looking.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        except ValueError:
            return None
        finally:
            _looking.name = before
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, then calls the functions that wait for it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        made: Optional[ModuleType] = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # The module must see its own loader, not this one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _lock:
            ready = _waiting.pop(module.__name__, [])
        for then in ready:
            then(module)

    def __getattr__(self, name: str) -> Any:
        # Optional methods of loaders, such as is_package and get_source.
        return getattr(self._loader, name)


_FINDER = _Finder()
