"""Exports how long transfers waited with vLLM's own metrics of its connector.

vLLM asks the worker's connector for statistics after each step, adds those of all workers, logs them, and shows them on
``/metrics``. The wrapped connector's statistics are those of the connector, and Laxity's under the key ``laxity``:

* ``laxity:kv_permit_wait_seconds``: from when a transfer was asked for until its permit;
* ``laxity:kv_post_seconds``: how long it took to post;
* ``laxity:kv_network_seconds``: from the post until the connector saw that it was complete;
* ``laxity:kv_scheduled_bytes_total``;
* ``laxity:ttft_queue_seconds``, ``laxity:ttft_load_seconds``, ``laxity:ttft_compute_seconds``: how a request's time to
  its first token in this engine divides. ``load`` is the wait for KV cache from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

from .._measured import PARTS, REQUEST_PARTS, requests, transfers

KEY = "laxity"

#: Methods that a connector needs for this. All recorded releases have them.
METHODS = ("get_kv_connector_stats", "build_kv_connector_stats", "build_prom_metrics")

_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_HISTOGRAMS = {
    "permit_wait": ("kv_", "Time from when a transfer of KV cache was asked for until its permit."),
    "post": ("kv_", "Time to post a transfer of KV cache."),
    "network": ("kv_", "Time from when a transfer of KV cache was posted until the connector saw that it was complete."),
    "queue": ("ttft_", "Part of the time to the first token: until the engine began with the request."),
    "load": ("ttft_", "Part of the time to the first token: the wait for KV cache from elsewhere."),
    "compute": ("ttft_", "Part of the time to the first token: from the first step of the request on."),
}


class Stats:
    """The statistics of the connector and of Laxity, as a ``KVConnectorStats`` of vLLM, which pickles it."""

    def __init__(self, inner: Any, ours: dict[str, list[float]]) -> None:
        self.inner = inner
        self.ours = ours

    @property
    def data(self) -> dict[str, Any]:
        inner = {} if self.inner is None else self.inner.data
        return {**inner, KEY: self.ours}

    def to_dict(self) -> dict[str, Any]:
        inner = {} if self.inner is None else getattr(self.inner, "to_dict", lambda: self.inner.data)()
        return {**inner, KEY: self.ours}

    def is_empty(self) -> bool:
        return not any(self.ours.values()) and (self.inner is None or bool(self.inner.is_empty()))

    def reset(self) -> None:
        self.ours = {}
        if self.inner is not None:
            self.inner.reset()

    def aggregate(self, other: Any) -> "Stats":
        theirs = other.inner if isinstance(other, Stats) else other
        if self.inner is None:
            self.inner = theirs
        elif theirs is not None:
            self.inner = self.inner.aggregate(theirs)
        if isinstance(other, Stats):
            parts = (*PARTS, *REQUEST_PARTS)
            self.ours = {part: [*self.ours.get(part, ()), *other.ours.get(part, ())] for part in parts}
        return self

    def reduce(self) -> dict[str, Any]:
        """What vLLM logs of an interval."""
        reduced = {} if self.inner is None or self.inner.is_empty() else dict(self.inner.reduce())
        for part, name in (("permit_wait", "Avg permit wait (ms)"), ("network", "Avg network time (ms)")):
            values = self.ours.get(part)
            if values:
                reduced[name] = round(sum(values) / len(values) * 1e3, 3)
        return reduced


class Prom:
    """The connector's Prometheus metrics and Laxity's."""

    def __init__(
        self, inner: Any, metric_types: Mapping[Any, Any], labelnames: Any, labelvalues: Mapping[int, Any]
    ) -> None:
        self._inner = inner
        # The keys are classes of prometheus_client. The values may be Ray's.
        types = {kind.__name__: made for kind, made in metric_types.items()}
        self._metrics: dict[tuple[str, int], Any] = {}
        for part, (group, text) in _HISTOGRAMS.items():
            histogram = types["Histogram"](
                name=f"laxity:{group}{part}_seconds", documentation=text, buckets=_BUCKETS, labelnames=labelnames
            )
            for engine, values in labelvalues.items():
                self._metrics[part, engine] = histogram.labels(*values)
        counter = types["Counter"](
            name="laxity:kv_scheduled_bytes", documentation="Bytes of KV cache with a permit.", labelnames=labelnames
        )
        for engine, values in labelvalues.items():
            self._metrics["bytes", engine] = counter.labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        theirs = {key: value for key, value in transfer_stats_data.items() if key != KEY}
        if theirs and self._inner is not None:
            self._inner.observe(theirs, engine_idx)
        ours = transfer_stats_data.get(KEY) or {}
        for part in _HISTOGRAMS:
            for value in ours.get(part, ()):
                self._metrics[part, engine_idx].observe(value)
        if ours.get("bytes"):
            self._metrics["bytes", engine_idx].inc(sum(ours["bytes"]))


def methods(connector: Any) -> dict[str, Any]:
    """The methods that a wrapped connector has for this. Empty if the connector lacks one of :data:`METHODS`."""
    if not all(callable(getattr(connector, name, None)) for name in METHODS):
        return {}
    build: Callable[..., Any] = connector.build_kv_connector_stats
    # A MultiConnector asks the class for its children. Those of the wrapped class have no metrics of Laxity.
    prom: Callable[..., Any] = connector.build_prom_metrics.__func__

    def get_kv_connector_stats(self: Any, *args: Any, **named: Any) -> Any:
        inner = connector.get_kv_connector_stats(self, *args, **named)
        ours = {**transfers.take(), **requests.take()}
        return None if inner is None and not any(ours.values()) else Stats(inner, ours)

    def build_kv_connector_stats(cls: type, data: Optional[Mapping[str, Any]] = None) -> Any:
        if data is None or KEY not in data:
            return build(data)
        theirs = {key: value for key, value in data.items() if key != KEY}
        return Stats(build(theirs) if theirs else None, data[KEY])

    def build_prom_metrics(
        cls: type, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        inner = prom(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues)
        return Prom(inner, metric_types, labelnames, per_engine_labelvalues)

    return {
        "get_kv_connector_stats": get_kv_connector_stats,
        "build_kv_connector_stats": classmethod(build_kv_connector_stats),
        "build_prom_metrics": classmethod(build_prom_metrics),
    }
