"""SGLang's prefill-decode disaggregation under Laxity, with its Mooncake and NIXL backends.

SGLang 0.5.11 and later load this package by themselves (entry point ``sglang.srt.plugins``). Earlier releases are
started through it::

    python -m laxity.sglang -- python -m sglang.launch_server --disaggregation-mode prefill ...

Transfers that wait on a prefill instance are then sent in the scheduler's order. Requests have deadlines: from the
header ``x-llm-d-slo-ttft-ms``, the JSON field ``slo_ttft_ms`` or ``custom_params.laxity``, else from
:mod:`laxity.objectives`. Without a daemon SGLang works as before.

``LAXITY_SGLANG=off`` switches the package off. If a release of SGLang differs from what the package relies on, it runs
unchanged, and a warning names the difference. See :mod:`laxity.sglang._patch`.
"""

from __future__ import annotations

import logging
import os

from .._after_import import after_import
from ._queue import PermitQueue

__all__ = ["PermitQueue", "install"]

_installed = False


def install() -> None:
    """Changes SGLang's modules in this process as they are imported. Call it from the main thread before other threads
    start. Further calls have no effect."""
    global _installed
    if _installed or os.environ.get("LAXITY_SGLANG", "on").lower() in ("off", "0", "no", "false"):
        return
    _installed = True
    logging.getLogger("laxity.sglang").info("SGLang runs under Laxity (LAXITY_SGLANG=off: as released)")
    from ._patch import CHANGES

    for name, change in CHANGES.items():
        after_import(name, change)
