"""Does something to a module when it is imported, or now if it is there.

The wrappers change engines that are imported later, or never. (wrapt has the same; the wheel has no dependencies,
since it goes into the environments of engines that pin theirs.)
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
#: Modules that were being imported already when they were asked for.
_begun: dict[str, ModuleType] = {}
_looking = threading.local()


def after_import(name: str, then: Then) -> None:
    """Calls ``then(module)`` once, as soon as the module ``name`` is imported. It must not raise: it would be the
    importer's error."""
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
    """Of those that had begun: whoever imports anything looks which are done."""
    with _lock:
        done = [name for name, module in _begun.items() if not _initializing(module)]
        ready = [(_begun.pop(name), _waiting.pop(name, [])) for name in done]
    for module, waited in ready:
        for then in waited:
            then(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find the module, and puts itself between it and its loader."""

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
    """A loader that tells when it is done."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        made: Optional[ModuleType] = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # The module sees the loader that it would have had.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _lock:
            ready = _waiting.pop(module.__name__, [])
        for then in ready:
            then(module)

    def __getattr__(self, name: str) -> Any:
        # is_package, get_source and the like.
        return getattr(self._loader, name)


_FINDER = _Finder()
