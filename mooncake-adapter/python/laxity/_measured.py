"""How long transfers and requests of this process took, and what they waited for. Engines export it with their own
metrics."""

from __future__ import annotations

import threading

#: The parts of a transfer's time, in seconds, and its bytes.
PARTS = ("permit_wait", "post", "network", "bytes")

#: The parts of a request's time to its first token in this engine, in seconds: until the engine began with it, until
#: its KV cache had come from elsewhere, and from then on.
REQUEST_PARTS = ("queue", "load", "compute")

#: Maximum number of transfers, and of requests, that are kept until somebody takes them.
KEPT_MAX = 4096


class Measured:
    """Collects what has finished. Safe from any thread."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, list[float]] = {part: [] for part in parts}

    def add(self, *values: float) -> None:
        """Notes one thing: a value for each part. Beyond :data:`KEPT_MAX` the new ones are left out."""
        with self._lock:
            for kept, value in zip(self._parts.values(), values):
                if len(kept) < KEPT_MAX:
                    kept.append(value)

    def take(self) -> dict[str, list[float]]:
        """Returns what was noted since the last call: a list for each part."""
        with self._lock:
            taken, self._parts = self._parts, {part: [] for part in self._parts}
        return taken


#: The transfers of this process.
transfers = Measured(PARTS)

#: The requests of this process.
requests = Measured(REQUEST_PARTS)
