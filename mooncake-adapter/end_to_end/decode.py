"""The decode host: holds the blocks that are reused, takes collectives of the prefill host's units, and says when a
layer's KV cache has landed.

A layer has landed when its bytes in this host's memory are those that left: Mooncake's word that a write is complete is
the sender's. Times are CLOCK_MONOTONIC's, which both hosts share here.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
from typing import Any

from exchange import Exchange
from hints import Hints
from memory import Memory
from plan import Plan
from prefill import WARM_UP_BYTES

#: Between two looks at bytes that have not landed.
LOOK_S = 0.0005
#: Bytes that are not there after this never will be.
LANDS_WITHIN_S = 20.0


class Decode:
    def __init__(self, plan: Plan, variant: str) -> None:
        self.plan, self.shape = plan, plan.shape
        self.hints = Hints(variant, self.shape)
        self.requests = {one.number: one for one in plan.requests}
        self.left = {number: self.shape.layers for number in self.requests}
        self.memory = Memory(self.shape, plan.requests)
        place = plan.decode
        self.control = socket.create_server((place.management, plan.management_port))
        self.exchanges = socket.create_server((place.data, plan.exchange_port))
        self.engine = self.hints.engine()
        if self.engine.initialize(place.engine, "P2PHANDSHAKE", plan.transport, place.device) != 0:
            sys.exit(f"decode: Mooncake can't be initialised on {place.engine} {place.device}")
        if self.engine.register_memory(self.memory.address, self.memory.size) != 0:
            sys.exit("decode: Mooncake can't register the memory")
        self.collectives = 0
        self.wrong = 0
        self.late = 0

    def serve(self, link: socket.socket, most: int) -> None:
        def begun(number: int, layer: int) -> None:
            # The warm-up belongs to none.
            if number in self.requests:
                self.hints.layer(self.requests[number], layer)

        count, wrong = Exchange(self.hints, link, self.memory.view, most).serve(begun)
        self.collectives += count
        self.wrong += wrong

    def run(self) -> dict[str, Any]:
        control, _ = self.control.accept()
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = {"rpc_port": self.engine.get_rpc_port(), "address": self.memory.address}
        control.sendall(json.dumps(address).encode() + b"\n")
        most = max(WARM_UP_BYTES, *map(self.shape.collective_bytes, self.plan.requests))
        threads = []
        for _ in range(self.shape.units):
            link, _ = self.exchanges.accept()
            threads.append(threading.Thread(target=self.serve, args=(link, most), daemon=True))
            threads[-1].start()
        self.listen(control)
        # The prefill process has said that it is over, and hangs up.
        control.close()
        for thread in threads:
            thread.join(LANDS_WITHIN_S)
        return {
            "collectives": self.collectives,
            "wrong_collectives": self.wrong,
            "landed_after_completion": self.late,
            "stats": self.hints.stats(),
        }

    def listen(self, control: socket.socket) -> None:
        """Until the prefill host says that it is over."""
        pending: list[tuple[dict[str, Any], float]] = []
        heard = b""
        while True:
            readable, _, _ = select.select([control], [], [], LOOK_S if pending else None)
            if readable:
                piece = control.recv(65536)
                if not piece:
                    sys.exit("decode: the prefill host is gone")
                *lines, heard = (heard + piece).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    if said["op"] == "over":
                        return
                    if said["op"] == "landed":
                        pending.append((said, time.monotonic() + LANDS_WITHIN_S))
                    elif said["op"] == "arrived":
                        self.hints.arrived(self.requests[said["number"]], said["left_s"])
                    else:
                        self.hints.computed(self.requests[said["number"]])
            for entry in list(pending):
                said, give_up = entry
                right = self.is_right(said)
                if not right and time.monotonic() < give_up:
                    self.late += "looked" not in said
                    said["looked"] = True
                    continue
                pending.remove(entry)
                self.answer(control, said, right)

    def is_right(self, said: dict[str, Any]) -> bool:
        request = self.requests[said["number"]]
        place = self.memory.cache(request, said["layer"])
        return bool(self.memory.crc(place, self.shape.kv_bytes(request)) == said["crc"])

    def answer(self, control: socket.socket, said: dict[str, Any], right: bool) -> None:
        number = said["number"]
        answer = {"number": number, "layer": said["layer"], "at_s": time.monotonic(), "right": right}
        control.sendall(json.dumps(answer).encode() + b"\n")
        self.left[number] -= 1
        if self.left[number] == 0:
            self.hints.landed(self.requests[number])
