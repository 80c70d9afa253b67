"""A collective of two ranks: as many bytes each way, over when each has the other's.

It goes over a connection of its own per unit, on the network that the KV caches use. One end begins, with a head that
says how much and what for, the other answers with as much; the last byte of the answer says that all has come.
"""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from collections.abc import Callable

from hints import Hints

HEAD = struct.Struct("!QHI")


def receive(link: socket.socket, into: memoryview) -> None:
    while into:
        got = link.recv_into(into)
        if got == 0:
            raise ConnectionError("the peer of a collective is gone")
        into = into[got:]


class Sender(threading.Thread):
    """Sends while its caller receives."""

    def __init__(self, hints: Hints, link: socket.socket, peer: str, payload: memoryview) -> None:
        super().__init__(daemon=True)
        self._hints, self._link, self._peer, self._payload = hints, link, peer, payload
        self._go, self._is_over = threading.Semaphore(0), threading.Semaphore(0)
        self._what = (0, 0, 0, True)
        self._error: BaseException | None = None
        self.start()

    def begin(self, number: int, layer: int, nbytes: int, with_head: bool) -> None:
        self._what = (number, layer, nbytes, with_head)
        self._go.release()

    def finish(self) -> None:
        self._is_over.acquire()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        while True:
            self._go.acquire()
            try:
                self._send(*self._what)
            except BaseException as error:  # The caller's to raise.
                self._error = error
            self._is_over.release()

    def _send(self, number: int, layer: int, nbytes: int, with_head: bool) -> None:
        at = 0
        for piece in self._hints.pieces(number, layer, nbytes, self._peer, self._link):
            if with_head and at == 0:
                self._link.sendall(HEAD.pack(number, layer, nbytes))
            self._link.sendall(self._payload[at : at + piece])
            at += piece


class Exchange:
    """One end. `payload` is what both send, from its beginning."""

    def __init__(self, hints: Hints, link: socket.socket, payload: memoryview, most: int) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = link
        self._payload = payload
        self._landing = memoryview(bytearray(most))
        self._sender = Sender(hints, link, link.getpeername()[0], payload)

    def run(self, number: int, layer: int, nbytes: int) -> None:
        """Begins one, and returns when it is over."""
        self._sender.begin(number, layer, nbytes, True)
        receive(self._link, self._landing[:nbytes])
        receive(self._link, memoryview(bytearray(1)))
        self._sender.finish()

    def is_right(self, nbytes: int) -> bool:
        """Whether what came last is what the peer sends."""
        return zlib.crc32(self._landing[:nbytes]) == zlib.crc32(self._payload[:nbytes])

    def serve(self, begun: Callable[[int, int], None]) -> tuple[int, int]:
        """Answers until the peer hangs up; how many, and how many of those had wrong bytes. `begun` hears of each."""
        count = wrong = 0
        head = memoryview(bytearray(HEAD.size))
        while True:
            try:
                receive(self._link, head)
            except ConnectionError:
                return count, wrong
            number, layer, nbytes = HEAD.unpack(head)
            begun(number, layer)
            self._sender.begin(number, layer, nbytes, False)
            receive(self._link, self._landing[:nbytes])
            self._sender.finish()
            self._link.sendall(b".")
            count += 1
            wrong += not self.is_right(nbytes)
