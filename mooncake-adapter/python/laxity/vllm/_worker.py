"""The worker's side: gives the hints of each step, and of the layer that the model computes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import laxity

from .._telling import QuietScope, Teller
from . import _memory
from ._scheduler import REQUESTS_MAX, VERSION


class WorkerHints:
    """Follows one worker. Safe from any thread."""

    def __init__(
        self,
        tell: Teller,
        *,
        layers: int,
        layer_time_s: float,
        load: Optional[laxity.Stage],
        save: Optional[laxity.Stage],
        owner_ranges: int,
        num_blocks: int = 0,
        block_size: int = 0,
        groups: Optional[list[frozenset[str]]] = None,
    ) -> None:
        """``layers`` is 0 if the number of layers is not known yet. ``groups`` has the names of the layers in each
        group of KV caches."""
        self._tell = tell
        self._layers = layers
        self._layer_time_s = layer_time_s
        self.load = load
        self.save = save
        self._owner_ranges = owner_ranges
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._groups = groups
        self._lock = threading.RLock()
        self._caches: list[_memory.Cache] = []
        self._regions: list[_memory.Cache] = []
        self._indices: dict[str, Optional[int]] = {}
        self._token_bytes = 0
        #: Requests that were begun here, each with its batch (0 if it has none).
        self._requests: OrderedDict[str, int] = OrderedDict()
        self._members: dict[int, set[str]] = {}
        self._owned: dict[str, list[tuple[int, int]]] = {}
        #: The batch that is computed now, or 0.
        self.batch = 0
        self._layer = -1

    # Memory.

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Registers the memory of the KV caches."""
        found = self._tell(lambda: list(_memory.caches(kv_caches, self._num_blocks))) or []
        with self._lock:
            self.forget()
            self._caches = found
            self._regions = _memory.regions(found)
            self._layers = max([self._layers, *(cache.layer + 1 for cache in found)])
            if len(self._regions) < len({(cache.start, cache.nbytes) for cache in found}):
                self._tell.count("layers that share memory", "their transfers carry no layer")
            for cache in self._regions:
                self._tell(laxity.memory_layer, cache.start, cache.nbytes, cache.layer)
            rows = {row for cache in found for row in cache.rows}
            self._token_bytes = sum(row.length for row in rows) // self._block_size if self._block_size else 0

    def forget(self) -> None:
        """Forgets the memory of the KV caches."""
        with self._lock:
            regions, self._regions = self._regions, []
            for cache in regions:
                self._tell(laxity.memory_forget, cache.start, cache.nbytes)
            self._caches = []
            self._owned.clear()

    # Steps.

    def bind(self, step: Any) -> None:
        """Begins a step."""
        with self._lock:
            self._computed()
            if not isinstance(step, Mapping) or step.get("version") != VERSION:
                if step is not None:
                    self._tell.count("steps of another version of laxity", "use one version on all hosts")
                return
            for request_id in step["ended"]:
                self._end(request_id)
            for request_id, remains_s, tenant, priority, tokens in step["requests"]:
                trace = step.get("traces", {}).get(request_id, "")
                self._begin(request_id, remains_s, tenant, priority, tokens * self._token_bytes, trace)
            for request_id, groups in step["owned"]:
                self._own(request_id, groups)
            if step["batch"] and self._layers:
                self._start(step["batch"], step["members"])

    def layer(self, name: str) -> Optional[int]:
        """Notes that the model computes a layer, and returns the layer's number."""
        index = self._indices.get(name)
        if index is None:
            index = self._indices.setdefault(name, _memory.layer_index(name))
        # With dual batch overlap, two halves of a step alternate. The more advanced half counts.
        if index is not None and self.batch and index > self._layer:
            self._layer = index
            self._tell(laxity.layer_begin, self.batch, index)
        return index

    def computed(self) -> None:
        """Notes that the forward pass of the step was launched."""
        with self._lock:
            self._computed()

    def arrived(self, request_ids: Optional[Iterable[str]]) -> None:
        """Ends requests whose KV caches have arrived at the decode instance."""
        with self._lock:
            for request_id in request_ids or ():
                self._end(request_id)

    def close(self) -> None:
        """Ends all requests and forgets the memory."""
        with self._lock:
            self._computed()
            for request_id in list(self._requests):
                self._end(request_id)
            self.forget()

    def scope(self, stage: Optional[laxity.Stage], layer: Optional[int] = None) -> QuietScope:
        """A scope for transfers of the calling thread that belong to the step."""
        return self._tell.scope(stage=stage, layer=layer, batch=self.batch or None)

    # The methods below need the lock.

    def _start(self, batch: int, members: Iterable[str]) -> None:
        self.batch = batch
        self._layer = -1
        self._members[batch] = set()
        self._tell(laxity.batch_begin, batch, layers=self._layers, layer_time_s=self._layer_time_s)
        for request_id in members:
            self._leave(request_id)
            self._requests[request_id] = batch
            self._members[batch].add(request_id)
            self._tell(laxity.batch_join, batch, request_id)

    def _computed(self) -> None:
        batch, self.batch = self.batch, 0
        if batch:
            self._tell(laxity.compute_end, batch)
            if not self._members.get(batch):
                self._members.pop(batch, None)
                self._tell(laxity.batch_end, batch)

    def _begin(
        self, request_id: str, remains_s: Optional[float], tenant: str, priority: int, nbytes: int, trace: str
    ) -> None:
        if request_id in self._requests:
            return
        self._requests[request_id] = 0
        if len(self._requests) > REQUESTS_MAX:
            oldest = next(iter(self._requests))
            self._tell.count("requests that were never ended", oldest)
            self._end(oldest)
        self._tell(
            laxity.request_begin,
            request_id,
            deadline_s=remains_s,
            tenant=tenant,
            priority=priority,
            bytes=nbytes,
            traceparent=trace,
        )

    def _end(self, request_id: str) -> None:
        if request_id in self._requests:
            self._leave(request_id)
            del self._requests[request_id]
            self._tell(laxity.request_end, request_id)
        for address, nbytes in self._owned.pop(request_id, ()):
            # The memory stays registered for its layer, without an owner.
            self._tell(laxity.memory_owner, address, nbytes)

    def _leave(self, request_id: str) -> None:
        """Removes a request from its batch. A batch without members ends, unless it is computed now."""
        batch = self._requests.get(request_id, 0)
        members = self._members.get(batch)
        if members is None:
            return
        members.discard(request_id)
        if not members and batch != self.batch:
            del self._members[batch]
            self._tell(laxity.batch_end, batch)

    def _own(self, request_id: str, groups: list[list[tuple[int, int]]]) -> None:
        if request_id not in self._requests or not self._owner_ranges:
            return
        owned = self._owned.setdefault(request_id, [])
        for cache in self._caches:
            for row in cache.rows:
                for address, nbytes in _memory.ranges(row, self._runs(cache.name, groups)):
                    if len(owned) >= self._owner_ranges:
                        self._tell.count("requests in more pieces of memory than owner_ranges")
                        return
                    owned.append((address, nbytes))
                    self._tell(laxity.memory_owner, address, nbytes, request=request_id)

    def _runs(self, name: str, groups: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
        if len(groups) == 1:
            return groups[0]
        for names, runs in zip(self._groups or (), groups):
            if name in names:
                return runs
        return []
