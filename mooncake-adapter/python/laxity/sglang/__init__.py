"""SGLang's prefill-decode disaggregation under Laxity, with its Mooncake and NIXL backends.

SGLang 0.5.11 and later load this by themselves (entry point ``sglang.srt.plugins``); earlier ones are started through it::

    python -m laxity.sglang -- python -m sglang.launch_server --disaggregation-mode prefill ...

The transfers that wait on a prefill instance then leave in the scheduler's order, requests have deadlines (header
``x-slo-ttft-ms``, JSON field ``slo_ttft_ms``, or ``custom_params.laxity``; defaults of :mod:`laxity.objectives`),
and everything works as before where there is no daemon.

``LAXITY_SGLANG=off`` switches it off. A release in which something is not as it is known runs unchanged, with a
warning that says what: see :mod:`laxity.sglang._patch`.
"""

from __future__ import annotations

import os

from .._after_import import after_import
from ._queue import PermitQueue

__all__ = ["PermitQueue", "install"]

_installed = False


def install() -> None:
    """Changes SGLang in this process, as its modules are imported. Once; from the main thread, before there are
    others."""
    global _installed
    if _installed or os.environ.get("LAXITY_SGLANG", "on").lower() in ("off", "0", "no", "false"):
        return
    _installed = True
    from ._patch import CHANGES

    for name, change in CHANGES.items():
        after_import(name, change)
