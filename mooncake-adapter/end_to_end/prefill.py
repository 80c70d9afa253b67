"""The prefill host: fetches reused blocks, computes layer by layer, and writes each layer's KV cache to the decode host.

Computing is a wait of known length; everything else is real. All of a request's reused blocks are asked for when it
arrives, as engines do; its unit then waits for those of the layer that it is about to compute (time lost to `blocks`),
and after computing it for the layer's collective (time lost to the `collective`).
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import time
from typing import Any

from exchange import Exchange
from hints import Hints
from memory import SCRATCH_BYTES, Memory
from plan import Plan
from workload import Request

#: Between two looks at what Mooncake has under way.
LOOK_S = 0.0003
#: Collectives before the first arrival, and their bytes.
WARM_UP, WARM_UP_BYTES = 4, 256 << 10
#: From the warm-up to the first arrival.
LEAD_S = 0.2


def connect(address: str, port: int, limit_s: float) -> socket.socket:
    give_up = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((address, port))
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


class Life:
    """What becomes of a request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.reads: list[int] = []
        self.blocks_s: list[float] = []
        self.collective_s: list[float] = []
        #: By how much waits that stand for computing were too long.
        self.overslept_s: list[float] = []
        self.wrong: list[str] = []
        #: Layers that have not landed.
        self.left = 0
        self.landed_s = 0.0


class Prefill:
    def __init__(self, plan: Plan, variant: str) -> None:
        self.plan, self.shape = plan, plan.shape
        self.hints = Hints(variant, self.shape)
        self.memory = Memory(self.shape, plan.requests)
        self.engine = self.hints.engine()
        place = plan.prefill
        if self.engine.initialize(place.engine, "P2PHANDSHAKE", plan.transport, place.device) != 0:
            sys.exit(f"prefill: Mooncake can't be initialised on {place.engine} {place.device}")
        if self.engine.register_memory(self.memory.address, self.memory.size) != 0:
            sys.exit("prefill: Mooncake can't register the memory")
        self.hints.memory(self.memory)
        self.control = connect(plan.decode.management, plan.management_port, plan.limit_s)
        self.control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard = self.control.makefile("r", encoding="ascii")
        peer = json.loads(self.heard.readline())
        self.there = peer["address"]
        self.peer = f"{plan.decode.engine}:{peer['rpc_port']}"
        most = max(WARM_UP_BYTES, *map(self.shape.collective_bytes, plan.requests))
        self.exchanges = []
        for _ in range(self.shape.units):
            link = connect(plan.decode.data, plan.exchange_port, plan.limit_s)
            self.exchanges.append(Exchange(self.hints, link, self.memory.view, most))
        self.lives = {one.number: Life(one) for one in plan.requests}
        self.moved: queue.SimpleQueue[tuple[Life, int] | None] = queue.SimpleQueue()
        self.done = threading.Semaphore(0)
        self.control_lock = threading.Lock()
        self.broken: list[str] = []
        self.begun_s = 0.0

    def tell(self, **what: Any) -> None:
        with self.control_lock:
            self.control.sendall(json.dumps(what).encode() + b"\n")

    def guarded(self, what: Any, *args: Any) -> threading.Thread:
        """A thread whose end ends the run, if it is not a good one."""

        def body() -> None:
            try:
                what(*args)
            except BaseException as error:
                self.broken.append(f"{what.__name__}: {error!r}")
                for _ in self.lives:
                    self.done.release()

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    def warm_up(self) -> None:
        """Connections of the Transfer Engine are opened by its first transfers, and TCP begins slowly."""
        here, there = self.memory.address + self.memory.scratch, self.there + self.memory.scratch
        for move in (self.engine.transfer_sync_write, self.engine.transfer_sync_read):
            if (status := move(self.peer, here, there, SCRATCH_BYTES)) != 0:
                sys.exit(f"prefill: the first transfer to {self.peer} fails with {status}")
        for exchange in self.exchanges:
            for _ in range(WARM_UP):
                exchange.run(0, 0, WARM_UP_BYTES)

    def fetch(self, life: Life) -> None:
        """Asks for the reused blocks of all layers."""
        request, memory = life.request, self.memory
        nbytes = self.shape.reused_bytes(request)
        for layer in range(self.shape.layers if nbytes else 0):
            here = memory.address + memory.cache(request, layer)
            there = self.there + memory.source(request, layer, nbytes)
            with self.hints.transfer(request):
                number = self.engine.batch_transfer_async_read(self.peer, [here], [there], [nbytes])
            if number <= 0:
                raise RuntimeError(f"Mooncake takes no read: {number}")
            life.reads.append(number)

    def wait_for_blocks(self, life: Life, layer: int) -> None:
        if not life.reads:
            return
        while (status := self.engine.transfer_check_status(life.reads[layer])) == 0:
            time.sleep(LOOK_S)
        if status != 1:
            raise RuntimeError(f"a read of request {life.request.number} ended with {status}")

    def unit(self, waiting: queue.SimpleQueue[Life | None], exchange: Exchange) -> None:
        """Computes one request after the other."""
        shape, memory = self.shape, self.memory
        while (life := waiting.get()) is not None:
            request = life.request
            reused, collective = shape.reused_bytes(request), shape.collective_bytes(request)
            for layer in range(shape.layers):
                begin = time.monotonic()
                self.hints.layer(request, layer)
                self.wait_for_blocks(life, layer)
                life.blocks_s.append(time.monotonic() - begin)
                computed = time.monotonic() + shape.compute_s(request)
                time.sleep(max(0.0, computed - time.monotonic()))
                begin = time.monotonic()
                life.overslept_s.append(begin - computed)
                exchange.run(request.number, layer, collective)
                life.collective_s.append(time.monotonic() - begin)
                if not exchange.is_right(collective):
                    life.wrong.append(f"collective of layer {layer}")
                place = memory.cache(request, layer)
                source = memory.source(request, layer, reused)
                if memory.crc(place, reused) != memory.crc(source, reused):
                    life.wrong.append(f"reused blocks of layer {layer}")
                memory.compute(request, layer)
                self.moved.put((life, layer))
            self.hints.computed(request)
            self.tell(op="computed", number=request.number)

    def mover(self) -> None:
        """Writes layers to the decode host, and says there what came when it has."""
        under_way: list[tuple[Life, int, int, int]] = []
        while True:
            try:
                entry = self.moved.get(timeout=LOOK_S) if under_way else self.moved.get()
                if entry is None:
                    return
                under_way.append(self.write(*entry))
            except queue.Empty:
                pass
            for one in list(under_way):
                life, layer, number, crc = one
                status = self.engine.transfer_check_status(number)
                if status == 0:
                    continue
                under_way.remove(one)
                if status != 1:
                    raise RuntimeError(f"a write of request {life.request.number} ended with {status}")
                self.tell(op="landed", number=life.request.number, layer=layer, crc=crc)

    def write(self, life: Life, layer: int) -> tuple[Life, int, int, int]:
        request, memory = life.request, self.memory
        place, nbytes = memory.cache(request, layer), self.shape.kv_bytes(request)
        crc = memory.crc(place, nbytes)
        here, there = memory.address + place, self.there + place
        with self.hints.transfer(request):
            number = self.engine.batch_transfer_async_write(self.peer, [here], [there], [nbytes])
        if number <= 0:
            raise RuntimeError(f"Mooncake takes no write: {number}")
        return life, layer, number, crc

    def listen(self) -> None:
        """What the decode host says of what landed."""
        for line in self.heard:
            answer = json.loads(line)
            life = self.lives[answer["number"]]
            if not answer["right"]:
                life.wrong.append(f"layer {answer['layer']} at the decode host")
            life.landed_s = max(life.landed_s, answer["at_s"] - self.begun_s)
            life.left -= 1
            if life.left == 0:
                self.hints.landed(life.request)
                self.done.release()

    def run(self) -> dict[str, Any]:
        self.warm_up()
        waiting: list[queue.SimpleQueue[Life | None]] = []
        for exchange in self.exchanges:
            waiting.append(queue.SimpleQueue())
            self.guarded(self.unit, waiting[-1], exchange)
        self.guarded(self.mover)
        self.guarded(self.listen)
        self.begun_s = time.monotonic() + LEAD_S
        for life in self.lives.values():
            request = life.request
            due = self.begun_s + request.arrival_s
            time.sleep(max(0.0, due - time.monotonic()))
            life.left = self.shape.layers
            left_s = due + request.objective_s - time.monotonic()
            self.tell(op="arrived", number=request.number, left_s=left_s)
            self.hints.arrived(request, left_s)
            self.fetch(life)
            waiting[request.unit].put(life)
            if self.broken:
                break
        give_up = time.monotonic() + self.plan.limit_s
        for _ in self.lives:
            if self.broken or not self.done.acquire(timeout=max(0.0, give_up - time.monotonic())):
                break
        self.tell(op="over")
        if self.broken:
            sys.exit("prefill: " + "; ".join(self.broken))
        return {
            "requests": [self.outcome(life) for life in self.lives.values()],
            "seconds": time.monotonic() - self.begun_s,
            "stats": self.hints.stats(),
        }

    def outcome(self, life: Life) -> dict[str, Any]:
        request = life.request
        return {
            "number": request.number,
            "done": life.left == 0,
            "ttft_s": life.landed_s - request.arrival_s,
            "objective_s": request.objective_s,
            "blocks_s": life.blocks_s if request.reused else [],
            "collective_s": life.collective_s,
            "overslept_s": life.overslept_s,
            "wrong": life.wrong,
        }
