"""How long transfers of this process took, and what they waited for. Engines export it with their own metrics."""

from __future__ import annotations

import threading

#: The parts of a transfer's time, in seconds, and its bytes.
PARTS = ("permit_wait", "post", "network", "bytes")

#: Maximum number of transfers that are kept until somebody takes them.
TRANSFERS_MAX = 4096


class Measured:
    """Collects finished transfers. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, list[float]] = {part: [] for part in PARTS}

    def add(self, permit_wait_s: float, post_s: float, network_s: float, nbytes: int) -> None:
        """Notes a finished transfer. Beyond :data:`TRANSFERS_MAX` the new ones are left out."""
        with self._lock:
            if len(self._parts["bytes"]) < TRANSFERS_MAX:
                for part, value in zip(PARTS, (permit_wait_s, post_s, network_s, float(nbytes))):
                    self._parts[part].append(value)

    def take(self) -> dict[str, list[float]]:
        """Returns what was noted since the last call: a list for each of :data:`PARTS`."""
        with self._lock:
            taken, self._parts = self._parts, {part: [] for part in PARTS}
        return taken


#: The transfers of this process.
transfers = Measured()
