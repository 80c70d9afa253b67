"""Times of transfers among vLLM's own statistics of its connector."""

import dataclasses
import pickle

import pytest

from laxity import _measured
from laxity.vllm import _stats


@dataclasses.dataclass
class Inner:
    """Statistics as vLLM's NIXL connector has them."""

    data: dict

    def is_empty(self):
        return not self.data["num"]

    def aggregate(self, other):
        for key, values in other.data.items():
            self.data[key].extend(values)  # a key that is not its own is an error, as in vLLM
        return self

    def reduce(self):
        return {"transfers": len(self.data["num"])}


class Connector:
    said = None
    observed = []

    def get_kv_connector_stats(self):
        said, Connector.said = Connector.said, None
        return said

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Inner(data or {"num": []})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        class Prom:
            def observe(self, data, engine_idx=0):
                Connector.observed.append((data["num"], engine_idx))

        return Prom()


class Metric:
    made = {}

    def __init__(self, name, documentation, labelnames, buckets=None):
        self.name = name

    def labels(self, *labels):
        seen = self.made[self.name, labels] = []
        return type("Child", (), {"observe": staticmethod(seen.append), "inc": staticmethod(seen.append)})


Histogram, Counter = type("Histogram", (), {}), type("Counter", (), {})


@pytest.fixture
def wrapped():
    _measured.transfers.take()
    Connector.observed, Metric.made = [], {}
    yield type("Connector", (Connector,), _stats.methods(Connector))
    _measured.transfers.take()


def test_times_go_from_the_worker_to_metrics_beside_the_connectors_own(wrapped):
    worker = wrapped()
    assert worker.get_kv_connector_stats() is None
    _measured.transfers.add(0.25, 0.001, 0.5, 100)
    first = worker.get_kv_connector_stats()
    Connector.said = Inner({"num": [1]})
    second = worker.get_kv_connector_stats()
    Connector.said = Inner({"num": [2]})
    _measured.transfers.add(0.75, 0.002, 0.5, 28)
    _measured.requests.add(0.1, 0.2, 0.3)
    third = worker.get_kv_connector_stats()
    assert not first.is_empty() and not second.is_empty()
    together = pickle.loads(pickle.dumps(first)).aggregate(second).aggregate(third)
    data = together.to_dict()
    assert data == together.data
    assert data["num"] == [1, 2] and data["laxity"]["permit_wait"] == [0.25, 0.75]

    prom = wrapped.build_prom_metrics(None, {Histogram: Metric, Counter: Metric}, ["engine"], {0: ["a"], 1: ["b"]})
    prom.observe(data, 1)
    assert Connector.observed == [([1, 2], 1)]
    assert Metric.made["laxity:kv_permit_wait_seconds", ("b",)] == [0.25, 0.75]
    assert Metric.made["laxity:kv_network_seconds", ("b",)] == [0.5, 0.5]
    assert Metric.made["laxity:kv_post_seconds", ("b",)] == [0.001, 0.002]
    assert Metric.made["laxity:kv_scheduled_bytes", ("b",)] == [128.0]
    assert Metric.made["laxity:kv_permit_wait_seconds", ("a",)] == []
    divided = [Metric.made[f"laxity:ttft_{part}_seconds", ("b",)] for part in _measured.REQUEST_PARTS]
    assert divided == [[0.1], [0.2], [0.3]]
    prom.observe({"laxity": first.ours})
    assert len(Connector.observed) == 1, "the connector's own metrics want its own keys"

    logged = wrapped.build_kv_connector_stats(data).reduce()
    assert logged == {"transfers": 2, "Avg permit wait (ms)": 500.0, "Avg network time (ms)": 500.0}
    assert wrapped.build_kv_connector_stats({"laxity": first.ours}).reduce()["Avg permit wait (ms)"] == 250.0
    assert isinstance(wrapped.build_kv_connector_stats(), Inner), "as without Laxity"


def test_a_connector_without_statistics_stays_without():
    assert _stats.methods(type("Old", (), {"get_kv_connector_stats": lambda self: None})) == {}


def test_transfers_that_nobody_takes_are_bounded():
    measured = _measured.Measured(_measured.PARTS)
    for _ in range(_measured.KEPT_MAX + 7):
        measured.add(0.0, 0.0, 0.0, 1)
    assert {len(values) for values in measured.take().values()} == {_measured.KEPT_MAX}
    assert not any(measured.take().values())
