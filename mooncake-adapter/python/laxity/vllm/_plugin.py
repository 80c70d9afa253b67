"""Puts vLLM's connectors under Laxity, without a module path in ``--kv-transfer-config``.

vLLM loads the entry points of ``vllm.general_plugins`` in each of its processes. The plugin changes how vLLM looks
up the class of a connector. ``LAXITY_VLLM=off`` leaves it as it is.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .._after_import import after_import
from .._telling import Teller
from ._wrap import under_laxity

#: The variable that switches the plugin off.
VARIABLE = "LAXITY_VLLM"

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
#: Methods that look up the class of a connector. Some releases use the first inside.
_LOOKUPS = ("_get_connector_class_with_compat", "get_connector_class")
_tell = Teller("vllm")
#: vLLM shows what its own loggers and those below them say.
_log = logging.getLogger("vllm.laxity")
_said: list[type] = []


def wanted() -> bool:
    """Whether the plugin changes anything (``LAXITY_VLLM``)."""
    return os.environ.get(VARIABLE, "on").lower() not in ("off", "0", "no", "false")


def install() -> None:
    """Wraps every connector that this process looks up from now on."""
    if wanted():
        after_import(_FACTORY, _change)


def _change(module: ModuleType) -> None:
    factory: Any = getattr(module, "KVConnectorFactory", None)
    lookups = [name for name in _LOOKUPS if inspect.ismethod(getattr(factory, name, None))]
    if not lookups:
        what = "KVConnectorFactory without get_connector_class"
        _tell.count(what, "name laxity.vllm as kv_connector_module_path instead; connectors run as released")
    for name in lookups:
        original = getattr(factory, name)
        if not getattr(original, "_laxity", False):
            setattr(factory, name, classmethod(_wrapping(original.__func__)))


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def lookup(cls: type, *args: Any, **named: Any) -> Any:
        found = original(cls, *args, **named)
        if isinstance(found, tuple):  # the class, and whether its constructor takes the cache's configuration
            return (_under_laxity(found[0]), *found[1:])
        return _under_laxity(found)

    lookup._laxity = True  # type: ignore[attr-defined]
    return lookup


def _under_laxity(connector: Any) -> Any:
    """The connector's class under Laxity, or the class itself if that fails."""
    wrapped = _tell(under_laxity, connector) or connector
    if wrapped is not connector and wrapped not in _said:
        _said.append(wrapped)
        _log.info("%s runs under Laxity (%s=off: as released)", connector.__name__, VARIABLE)
    return wrapped
