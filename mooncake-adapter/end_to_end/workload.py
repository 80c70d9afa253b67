"""Who asks for what, when, and until when: the same for every variant of a round.

A prefill host has units, each of which computes one request at a time. Of a request, `reused` blocks of each layer's KV
cache lie in the store and are fetched, `new` ones are computed; all of them go to the decode host. What a layer
costs is proportional to its blocks, so ratios of bytes and times are the same for all requests.
"""

from __future__ import annotations

import dataclasses
import random

#: Time on the wire for its own collectives, as a part of an uncontended layer.
COLLECTIVE_SHARE = 0.4
#: Bytes of KV cache to bytes of collectives (each way) of a computed block.
COLLECTIVE_BYTES_PER_KV_BYTE = 2.0
#: Requests with reused blocks, and how many of those they have to one that is computed.
REUSING, REUSED_PER_NEW = 0.7, (1.0, 4.0)
#: Computed blocks of a request: median and spread (of the logarithm), and the bounds.
NEW_MEDIAN, NEW_SIGMA, NEW_MIN, NEW_MAX = 12.0, 0.7, 3, 48


@dataclasses.dataclass(frozen=True)
class Request:
    #: Counted from 1: this is its id, and that of its batch, on all hosts.
    number: int
    arrival_s: float
    unit: int
    new: int
    reused: int
    #: After its arrival.
    objective_s: float

    @property
    def blocks(self) -> int:
        return self.new + self.reused


@dataclasses.dataclass(frozen=True)
class Shape:
    """What all requests have in common."""

    layers: int
    block_bytes: int
    rate_bytes_s: float
    units: int

    def collective_bytes(self, request: Request) -> int:
        """Bytes of a layer's collective in each direction."""
        return int(request.new * self.block_bytes * COLLECTIVE_BYTES_PER_KV_BYTE)

    def compute_s(self, request: Request) -> float:
        """Time to compute a layer, without its collective."""
        wire = self.collective_bytes(request) / self.rate_bytes_s
        return wire * (1 - COLLECTIVE_SHARE) / COLLECTIVE_SHARE

    def layer_s(self, request: Request) -> float:
        """Time of a layer with its collective, without contention."""
        return self.compute_s(request) + self.collective_bytes(request) / self.rate_bytes_s

    def kv_bytes(self, request: Request) -> int:
        """Bytes of the request's KV cache in a layer."""
        return request.blocks * self.block_bytes

    def reused_bytes(self, request: Request) -> int:
        """Bytes of the request's reused blocks in a layer."""
        return request.reused * self.block_bytes

    def ideal_s(self, request: Request) -> float:
        """Time to first token of a request that has the hosts and the link for itself."""
        read_s = self.reused_bytes(request) / self.rate_bytes_s
        write_s = self.kv_bytes(request) / self.rate_bytes_s
        now = landed = 0.0
        for layer in range(self.layers):
            now = max(now, (layer + 1) * read_s) + self.layer_s(request)
            landed = max(landed, now) + write_s
        return landed


def requests(shape: Shape, count: int, load: float, slo_scale: float, seed: int) -> list[Request]:
    """Open loop: exponential gaps, such that the prefill host's way out is busy for `load` of the time. Objectives are
    `slo_scale` times what the request takes alone. A request goes to the unit that would be free first."""
    chance = random.Random(seed)
    sizes = []
    for _ in range(count):
        new = round(NEW_MEDIAN * chance.lognormvariate(0.0, NEW_SIGMA))
        new = min(NEW_MAX, max(NEW_MIN, new))
        has_reused = chance.random() < REUSING
        ratio = chance.uniform(*REUSED_PER_NEW)
        sizes.append((new, round(new * ratio) if has_reused else 0))

    drafts = [Request(0, 0.0, 0, new, reused, 0.0) for new, reused in sizes]
    sent = [shape.layers * (shape.kv_bytes(one) + shape.collective_bytes(one)) for one in drafts]
    gap_s = sum(sent) / count / shape.rate_bytes_s / load
    gaps = [chance.expovariate(1.0) for _ in range(count)]
    # The mean of the drawn gaps differs from one, so they are stretched to give exactly `load`.
    stretch = gap_s * count / sum(gaps)

    free_at = [0.0] * shape.units
    now = 0.0
    planned = []
    for number, (draft, gap) in enumerate(zip(drafts, gaps), start=1):
        now += gap * stretch
        unit = min(range(shape.units), key=lambda unit: (max(now, free_at[unit]), unit))
        free_at[unit] = max(now, free_at[unit]) + shape.layers * shape.layer_s(draft)
        objective_s = slo_scale * shape.ideal_s(draft)
        planned.append(
            dataclasses.replace(
                draft, number=number, arrival_s=now, unit=unit, objective_s=objective_s
            )
        )
    return planned


def offered(shape: Shape, planned: list[Request]) -> dict[str, float]:
    """What the requests ask of the hosts, as parts of their capacity."""
    seconds = planned[-1].arrival_s
    bytes_s = shape.rate_bytes_s * seconds
    out = sum(shape.layers * (shape.kv_bytes(one) + shape.collective_bytes(one)) for one in planned)
    into = sum(
        shape.layers * (shape.reused_bytes(one) + shape.collective_bytes(one)) for one in planned
    )
    busy_s = sum(shape.layers * shape.layer_s(one) for one in planned)
    return {"egress": out / bytes_s, "ingress": into / bytes_s, "units": busy_s / seconds / shape.units}
