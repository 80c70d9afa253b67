"""Replaces Mooncake's ``TransferEngine``.

This module relies on these facts about ``mooncake.engine.TransferEngine`` of mooncake-transfer-engine 0.3.13:

* Synchronous calls release the GIL, and return 0 or a negative number.
* Asynchronous calls return a positive number, or 0 or less if they refuse.
* ``transfer_check_status`` returns 0 while a transfer is in progress, 1 when it is complete, and a negative number
  when it failed. After the end of a transfer it may be called once. It looks only at the first piece of a transfer.
* ``get_batch_transfer_status`` blocks, and returns 0 or a negative number.

``tests/test_mooncake_reflection.py`` compares methods and arguments with the installed package.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

try:
    from mooncake import engine as _mooncake
except ImportError as error:
    raise ImportError(
        "laxity.mooncake needs Mooncake's Transfer Engine, which can't be imported: "
        f"{error}. Install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda"
    ) from error

from .._laxity import _memory_own, _Transfers, stats
from ._deferred import Deferred
from ._gate import Gate, move
from ._pieces import Lists, Pieces

#: Protocols whose bytes pass no port of the daemon. They stay inside a host or in a rack's own fabric.
_NOT_ON_A_PORT = frozenset(
    ["nvlink", "nvlink_intra", "intra_nvlink", "mnnvl", "hip", "cxl", "shm", "nvmeof", "nvmeof_generic"]
)

#: How Laxity takes part in an engine's transfers.
GATE, HINT, NONE = "gate", "hint", "none"


_Real = _mooncake.TransferEngine


def _plain(numbers: Sequence[Any]) -> list[int] | None:
    """The numbers as Mooncake reads them, or ``None`` if Mooncake will refuse them."""
    try:
        plain = [operator.index(number) for number in numbers]
    except TypeError:
        return None
    return plain if all(0 <= number < 1 << 64 for number in plain) else None


def _without_notify(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments after the operation code, for all parts of a transfer but the last. Only the last part notifies
    the peer."""
    named = dict(zip(("notify", "transport_hint"), args), **kwargs)
    named.pop("notify", None)
    return named


def _mode_of(protocol: str) -> str:
    if protocol in _NOT_ON_A_PORT:
        return NONE
    # liblaxity.so sees each work request and the memory that it moves.
    if protocol == "rdma" and stats()["preloaded"]:
        return HINT
    return GATE


class TransferEngine(_mooncake.TransferEngine):
    """Mooncake's engine under Laxity. Synchronous calls wait for their permits. Asynchronous calls return a number at
    once. If Mooncake refuses such a transfer later, the transfer's status says that it failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._laxity_mode = NONE
        self._laxity_deferred: Deferred | None = None

    @property
    def laxity_mode(self) -> str:
        """``"gate"``: transfers ask for permits before Mooncake gets them. ``"hint"``: ``liblaxity.so`` schedules
        what Mooncake posts, with hints from here. ``"none"``: not initialised, or no network."""
        return self._laxity_mode

    def initialize(self, *args: Any, **kwargs: Any) -> int:
        return self._laxity_begin(super().initialize(*args, **kwargs), args, kwargs)

    def initialize_ext(self, *args: Any, **kwargs: Any) -> int:
        return self._laxity_begin(super().initialize_ext(*args, **kwargs), args, kwargs)

    def _laxity_begin(self, status: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if status == 0:
            protocol = args[2] if len(args) > 2 else kwargs.get("arg2", "")
            self._laxity_mode = _mode_of(protocol)
        return status

    # Synchronous calls. `whole` makes the call as it came, `part` makes it for some of its pieces.

    def _sync(
        self,
        is_write: bool,
        peer: str,
        here: Sequence[int],
        there: Sequence[int],
        lengths: Sequence[int],
        whole: Callable[[], int],
        part: Callable[[Lists, bool], int],
    ) -> int:
        pieces = self._pieces(here, there, lengths)
        if pieces is None:
            return whole()

        def send(lists: Lists, last: bool) -> int:
            return whole() if sum(lists[2]) == total else part(lists, last)

        total = pieces.left
        transfers = _Transfers()
        return move(Gate(transfers, is_write, peer, pieces), transfers, send)

    def _pieces(
        self, here: Sequence[int], there: Sequence[int], lengths: Sequence[int]
    ) -> Pieces | None:
        """The pieces to gate, or ``None`` if Mooncake gets the call as it is."""
        if self._laxity_mode == NONE:
            return None
        plain = [_plain(numbers) for numbers in (here, there, lengths)]
        ours, theirs, sizes = plain
        if ours is None or theirs is None or sizes is None:
            return None
        if not len(ours) == len(theirs) == len(sizes) or sum(sizes) == 0:
            return None
        if self._laxity_mode == HINT:
            _memory_own(ours, sizes)
            return None
        return Pieces(ours, theirs, sizes)

    def _one(
        self, is_write: bool, peer: str, place: tuple[int, int, int], call: Callable[..., int]
    ) -> int:
        def part(pieces: Lists, last: bool) -> int:
            statuses = (call(*piece, last) for piece in zip(*pieces))
            return next((status for status in statuses if status != 0), 0)

        here, there, length = place
        return self._sync(
            is_write, peer, [here], [there], [length], lambda: call(here, there, length, True), part
        )

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(here: int, there: int, size: int, _last: bool) -> int:
            return _int(
                _Real.transfer_sync_write(self, target_hostname, here, there, size, *args, **kwargs)
            )

        return self._one(True, target_hostname, (buffer, peer_buffer_address, length), call)

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(here: int, there: int, size: int, _last: bool) -> int:
            return _int(
                _Real.transfer_sync_read(self, target_hostname, here, there, size, *args, **kwargs)
            )

        return self._one(False, target_hostname, (buffer, peer_buffer_address, length), call)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: Any,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(here: int, there: int, size: int, last: bool) -> int:
            most = (target_hostname, here, there, size, opcode)
            if last:
                return _int(_Real.transfer_sync(self, *most, *args, **kwargs))
            return _int(_Real.transfer_sync(self, *most, **_without_notify(args, kwargs)))

        is_write = opcode == _mooncake.TransferOpcode.Write
        return self._one(is_write, target_hostname, (buffer, peer_buffer_address, length), call)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(pieces: Any, _last: bool = True) -> int:
            return _int(
                _Real.batch_transfer_sync_write(self, target_hostname, *pieces, *args, **kwargs)
            )

        pieces = (buffers, peer_buffer_addresses, lengths)
        return self._sync(True, target_hostname, *pieces, lambda: call(pieces), call)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(pieces: Any, _last: bool = True) -> int:
            return _int(
                _Real.batch_transfer_sync_read(self, target_hostname, *pieces, *args, **kwargs)
            )

        pieces = (buffers, peer_buffer_addresses, lengths)
        return self._sync(False, target_hostname, *pieces, lambda: call(pieces), call)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: Any,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(pieces: Any, last: bool = True) -> int:
            real, most = _Real.batch_transfer_sync, (target_hostname, *pieces, opcode)
            if last:
                return _int(real(self, *most, *args, **kwargs))
            return _int(real(self, *most, **_without_notify(args, kwargs)))

        is_write = opcode == _mooncake.TransferOpcode.Write
        pieces = (buffers, peer_buffer_addresses, lengths)
        return self._sync(is_write, target_hostname, *pieces, lambda: call(pieces), call)

    # Asynchronous calls.

    def _async(
        self,
        is_write: bool,
        peer: str,
        here: Sequence[int],
        there: Sequence[int],
        lengths: Sequence[int],
        whole: Callable[[], int],
        part: Callable[[Lists], int],
    ) -> int:
        pieces = self._pieces(here, there, lengths)
        if self._laxity_mode != GATE:
            return whole()
        if pieces is None:
            # Nothing to schedule, or Mooncake will refuse it. Mooncake's number may be another transfer's here.
            return self._laxity_asked().adopt(whole())
        return self._laxity_asked().submit(is_write, peer, pieces, part)

    def _laxity_asked(self) -> Deferred:
        if self._laxity_deferred is None:
            self._laxity_deferred = Deferred(
                lambda number: _int(_Real.transfer_check_status(self, number))
            )
        return self._laxity_deferred

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(here: int, there: int, size: int) -> int:
            return _int(
                _Real.transfer_submit_write(
                    self, target_hostname, here, there, size, *args, **kwargs
                )
            )

        def part(pieces: Lists) -> int:
            # Each part of a single piece is a single piece.
            return call(pieces[0][0], pieces[1][0], pieces[2][0])

        return self._async(
            True,
            target_hostname,
            [buffer],
            [peer_buffer_address],
            [length],
            lambda: call(buffer, peer_buffer_address, length),
            part,
        )

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(pieces: Any) -> int:
            return _int(
                _Real.batch_transfer_async_write(self, target_hostname, *pieces, *args, **kwargs)
            )

        pieces = (buffers, peer_buffer_addresses, lengths)
        return self._async(True, target_hostname, *pieces, lambda: call(pieces), call)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(pieces: Any) -> int:
            return _int(
                _Real.batch_transfer_async_read(self, target_hostname, *pieces, *args, **kwargs)
            )

        pieces = (buffers, peer_buffer_addresses, lengths)
        return self._async(False, target_hostname, *pieces, lambda: call(pieces), call)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: Any,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        def call(pieces: Any) -> int:
            most = (target_hostname, *pieces, opcode)
            return _int(_Real.batch_transfer_async(self, *most, *args, **kwargs))

        is_write = opcode == _mooncake.TransferOpcode.Write
        pieces = (buffers, peer_buffer_addresses, lengths)
        return self._async(is_write, target_hostname, *pieces, lambda: call(pieces), call)

    def transfer_check_status(self, arg0: int) -> int:
        if self._laxity_mode != GATE:
            return _int(_Real.transfer_check_status(self, arg0))
        return self._laxity_asked().check(arg0)

    def get_batch_transfer_status(self, arg0: Sequence[int]) -> int:
        if self._laxity_mode != GATE:
            return _int(_Real.get_batch_transfer_status(self, arg0))
        return self._laxity_asked().wait(arg0)


def _int(status: Any) -> int:
    """Mooncake's result, which has no declared type, as a number."""
    return int(status)


# Methods that the installed version lacks are removed here, too.
for _name in [name for name in vars(TransferEngine) if not name.startswith(("_", "laxity_"))]:
    if not hasattr(_Real, _name):
        delattr(TransferEngine, _name)
