"""Replaces Mooncake's ``MooncakeDistributedStore``. A fetch is KV_REUSE, and a put is BACKGROUND, unless the thread's
scope says otherwise.

The store moves an object in one piece, to a place that it chooses itself. So each call asks for one permit for all of
its bytes. The number of bytes comes from the call's arguments, or from the store if the call has only a key.

The tables below hold facts of ``mooncake.store.MooncakeDistributedStore`` as of 0.3.13.
``tests/test_mooncake_reflection.py`` compares them with the installed package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

try:
    from mooncake import store as _mooncake
except ImportError as error:
    raise ImportError(
        "laxity.mooncake needs Mooncake's store, which can't be imported: "
        f"{error}. Install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda"
    ) from error

from .._laxity import _Transfers
from .._stage import Stage
from ._engine import GATE, NONE, _mode_of

_Real = _mooncake.MooncakeDistributedStore

#: Bytes of a call, and an address in this process of some of them (0 if there is none).
Size = Callable[["MooncakeDistributedStore", "_Arguments"], "tuple[int, int]"]


class _Arguments:
    """The arguments of a call, by position or by name."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    def get(self, place: int, name: str) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)


def _total(sizes: Any) -> int:
    """The sum of numbers in nested lists."""
    if isinstance(sizes, Iterable):
        return sum(_total(size) for size in sizes)
    return int(sizes)


def _first(addresses: Any) -> int:
    while isinstance(addresses, (list, tuple)):
        if not addresses:
            return 0
        addresses = addresses[0]
    return int(addresses)


def _given(at: tuple[int, str], address: tuple[int, str]) -> Size:
    """The arguments give bytes and address."""

    def size(_store: MooncakeDistributedStore, arguments: _Arguments) -> tuple[int, int]:
        return _total(arguments.get(*at)), _first(arguments.get(*address))

    return size


def _asked(place: int, name: str) -> Size:
    """The store gives the bytes of a key, or of each key in a list."""

    def size(store: MooncakeDistributedStore, arguments: _Arguments) -> tuple[int, int]:
        keys = arguments.get(place, name)
        if isinstance(keys, str):
            keys = [keys]
        # The size is negative if there is no such object. Then nothing is moved.
        return sum(max(0, int(_Real.get_size(store, key))) for key in keys), 0

    return size


def _values(place: int, name: str, rest: bool = False) -> Size:
    """The values have a size: buffers, tensors, or lists of them. With ``rest``, all arguments from this position
    on are values."""

    def one(value: Any) -> int:
        if isinstance(value, (list, tuple)):
            return sum(one(item) for item in value)
        nbytes = getattr(value, "nbytes", None)
        return int(nbytes) if nbytes is not None else memoryview(value).nbytes

    def size(_store: MooncakeDistributedStore, arguments: _Arguments) -> tuple[int, int]:
        values = arguments.args[place:] if rest else arguments.get(place, name)
        return one(values), 0

    return size


def _with_metadata(_store: MooncakeDistributedStore, arguments: _Arguments) -> tuple[int, int]:
    sizes = [arguments.get(3, "size"), arguments.get(4, "metadata_size")]
    return _total(sizes), _first(arguments.get(1, "buffer_ptr"))


_BUFFER = _given((2, "size"), (1, "buffer_ptr"))
_BUFFERS = _given((2, "sizes"), (1, "buffer_ptrs"))
_MANY = _given((2, "all_sizes"), (1, "all_buffer_ptrs"))

#: Calls that fetch.
GETS: dict[str, Size] = {
    "get": _asked(0, "arg0"),
    "get_buffer": _asked(0, "arg0"),
    "get_batch": _asked(0, "arg0"),
    "batch_get_buffer": _asked(0, "arg0"),
    "get_tensor": _asked(0, "key"),
    "get_tensor_with_tp": _asked(0, "key"),
    "get_tensor_with_parallelism": _asked(0, "key"),
    "batch_get_tensor": _asked(0, "keys"),
    "batch_get_tensor_with_tp": _asked(0, "base_keys"),
    "batch_get_tensor_with_parallelism": _asked(0, "keys"),
    "get_tensor_into_cuda": _values(1, "tensor"),
    "batch_get_tensor_into_cuda": _values(1, "tensors_list"),
    "get_into": _BUFFER,
    "get_tensor_into": _BUFFER,
    "get_tensor_with_tp_into": _BUFFER,
    "get_tensor_with_parallelism_into": _BUFFER,
    "batch_get_into": _BUFFERS,
    "batch_get_tensor_into": _BUFFERS,
    "batch_get_tensor_with_tp_into": _BUFFERS,
    "batch_get_tensor_with_parallelism_into": _BUFFERS,
    "batch_get_into_multi_buffers": _MANY,
    "batch_get_into_multi_buffer_ranges": _MANY,
    "get_into_ranges": _given((4, "all_sizes"), (0, "buffer_ptrs")),
}

_PUTS_ALIKE: dict[str, Size] = {
    "put": _values(1, "value"),
    "put_batch": _values(1, "values"),
    "put_parts": _values(1, "", rest=True),
    "put_from": _BUFFER,
    "put_tensor": _values(1, "tensor"),
    "put_tensor_from": _BUFFER,
    "put_tensor_with_tp": _values(1, "tensor"),
    "put_tensor_with_tp_from": _BUFFER,
    "put_tensor_with_parallelism": _values(1, "tensor"),
    "put_tensor_with_parallelism_from": _BUFFER,
    "batch_put_from": _BUFFERS,
    "batch_put_from_multi_buffers": _MANY,
    "batch_put_tensor": _values(1, "tensors_list"),
    "batch_put_tensor_from": _BUFFERS,
    "batch_put_tensor_with_tp": _values(1, "tensors_list"),
    "batch_put_tensor_with_tp_from": _BUFFERS,
    "batch_put_tensor_with_parallelism": _values(1, "tensors_list"),
    "batch_put_tensor_with_parallelism_from": _BUFFERS,
}

#: Calls that store. The ``upsert`` of each ``put`` has the same arguments.
PUTS: dict[str, Size] = {
    **_PUTS_ALIKE,
    **{name.replace("put", "upsert", 1): size for name, size in _PUTS_ALIKE.items()},
    "upsert_batch": _values(1, "values"),
    "put_from_with_metadata": _with_metadata,
    "batch_put_from_multi_buffer_ranges": _MANY,
    "pub_tensor": _values(1, "tensor"),
    "pub_tensor_with_tp": _values(1, "tensor"),
    "batch_pub_tensor": _values(1, "tensors_list"),
    "batch_pub_tensor_with_tp": _values(1, "tensors_list"),
    "upsert_pub_tensor": _values(1, "tensor"),
    "batch_upsert_pub_tensor": _values(1, "tensors_list"),
}


class MooncakeDistributedStore(_mooncake.MooncakeDistributedStore):
    """Mooncake's store under Laxity. Each call that moves an object asks for a permit first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._laxity_mode = NONE

    @property
    def laxity_mode(self) -> str:
        """As :attr:`TransferEngine.laxity_mode`."""
        return self._laxity_mode

    def setup(self, *args: Any, **kwargs: Any) -> int:
        status = int(super().setup(*args, **kwargs))
        if status == 0:
            self._laxity_mode = _mode_of(_protocol(args, kwargs))
        return status


def _protocol(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The protocol in the arguments of ``setup``, which takes them one by one or as a dictionary."""
    given = args[0] if args and isinstance(args[0], dict) else kwargs
    if len(args) > 4:
        return str(args[4])
    return str(given.get("protocol", "tcp"))


def _gated(name: str, size: Size, stage: Stage, direction: str) -> Callable[..., Any]:
    real = getattr(_Real, name)

    @functools.wraps(real, assigned=("__name__", "__doc__"), updated=())
    def call(self: MooncakeDistributedStore, *args: Any, **kwargs: Any) -> Any:
        if self._laxity_mode != GATE:
            return real(self, *args, **kwargs)
        try:
            nbytes, address = size(self, _Arguments(args, kwargs))
        except (TypeError, ValueError, AttributeError):
            # The store refuses such arguments, and says why.
            return real(self, *args, **kwargs)
        if nbytes == 0:
            return real(self, *args, **kwargs)
        ticket = _Transfers().submit(stage, nbytes, address, direction, None, True)
        with ticket:
            while not ticket.done:
                ticket.wait()
            result = real(self, *args, **kwargs)
            ticket.complete(nbytes)
        return result

    return call


for _name, _size in GETS.items():
    if hasattr(_Real, _name):
        setattr(
            MooncakeDistributedStore, _name, _gated(_name, _size, Stage.KV_REUSE, "ingress")
        )
for _name, _size in PUTS.items():
    if hasattr(_Real, _name):
        setattr(
            MooncakeDistributedStore, _name, _gated(_name, _size, Stage.BACKGROUND, "egress")
        )
