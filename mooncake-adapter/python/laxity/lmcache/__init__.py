"""LMCache's remote stores under Laxity: each chunk of KV cache waits for a permit before it is moved.

LMCache runs inside vLLM or SGLang. Both load this package by themselves (entry points ``vllm.general_plugins`` and
``sglang.srt.plugins``). Any other program calls :func:`install` before it imports LMCache.

A load is KV_REUSE on the ingress port. It names its request, and its layer where LMCache moves single layers. A store
is BACKGROUND on the egress port. It names no request, because no request waits for it. The stores at ``lm://``,
``redis://``, ``redis-sentinel://``, ``redis-cluster://`` and ``resp://`` are covered. Other stores run as released.

``LAXITY_LMCACHE=off`` switches the package off. If a release of LMCache differs from what the package relies on, it
runs unchanged, and a warning names the difference. See :mod:`laxity.lmcache._patch`.
"""

from __future__ import annotations

import logging
import os

from .._after_import import after_import

__all__ = ["install"]

_installed = False


def install() -> None:
    """Changes LMCache's modules in this process as they are imported. Further calls have no effect."""
    global _installed
    if _installed or os.environ.get("LAXITY_LMCACHE", "on").lower() in ("off", "0", "no", "false"):
        return
    _installed = True
    logging.getLogger("laxity.lmcache").info("LMCache runs under Laxity (LAXITY_LMCACHE=off: as released)")
    from ._patch import CHANGES

    for name, change in CHANGES.items():
        after_import(name, change)
