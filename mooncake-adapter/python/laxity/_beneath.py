"""Whether a library below the wrappers already asks for permits.

A transfer that waits for permits twice can wait for ever: its own bytes fill the window that its work requests wait
for. So a wrapper asks for a permit only if no library below it does.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
from collections.abc import Mapping
from typing import Any, Optional


@functools.lru_cache(maxsize=1)
def preloaded() -> bool:
    """Whether ``liblaxity.so`` is in this process (``laxity run``, or ``LD_PRELOAD``)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return any(line.rstrip().rpartition("/")[2].startswith("liblaxity.so") for line in maps)
    except OSError:
        return False


def verbs_of_ucx(environment: Optional[Mapping[str, str]] = None, sysfs: str = "/sys/class/infiniband") -> bool:
    """Whether RDMA of UCX, and so of NIXL, passes the verbs library. On mlx5 NICs UCX writes to the device directly,
    unless ``UCX_TLS`` names a verbs transport."""
    transports = (os.environ if environment is None else environment).get("UCX_TLS", "")
    names = [name.strip() for name in transports.split(",")]
    if any(name.endswith("_verbs") for name in names):
        return True
    devices = glob.glob(os.path.join(glob.escape(sysfs), "*"))
    return bool(devices) and not any(os.path.basename(device).startswith("mlx5") for device in devices)


@functools.lru_cache(maxsize=1)
def _nixl_exempt() -> Any:
    try:
        function = ctypes.PyDLL(None).laxity_nixl_exempt
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p,), None
    return function


def exempt(handle: int) -> None:
    """Makes ``liblaxity_nixl.so``, if it is preloaded, pass the posts of this request of NIXL through."""
    function = _nixl_exempt()
    if function is not None:
        function(handle)
