"""What both processes of a run are told: a file of JSON."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from workload import Request, Shape


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a host is reached."""

    #: By the Transfer Engine's handshake, which is also where its TCP transport moves data.
    engine: str
    #: By collectives: on the network that is shaped.
    data: str
    #: By what is said about transfers: on one that is not.
    management: str
    #: RDMA device, or nothing.
    device: str


@dataclasses.dataclass(frozen=True)
class Plan:
    shape: Shape
    requests: list[Request]
    prefill: Place
    decode: Place
    transport: str
    #: How long anything may take beyond its time.
    limit_s: float
    management_port: int = 7480
    exchange_port: int = 7481

    def write(self, path: pathlib.Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: pathlib.Path) -> Plan:
        told = json.loads(path.read_text(encoding="utf-8"))
        told["shape"] = Shape(**told["shape"])
        told["requests"] = [Request(**one) for one in told["requests"]]
        for host in ("prefill", "decode"):
            told[host] = Place(**told[host])
        return cls(**told)
