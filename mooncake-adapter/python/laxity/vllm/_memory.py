"""Finds the memory of each layer's KV cache in the tensors that vLLM registers.

A tensor with contiguous blocks is one range of memory, which belongs to one layer. In cross-layer layouts the layers
of a block lie side by side, so the ranges of layers overlap. Then no range is registered, and transfers have the stage
and request of their scope, but no layer. In both layouts the blocks of a request can be registered, if the first or
second dimension of the tensor counts blocks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional

_AFTER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|block|h)\.(\d+)(?:\.|$)")
_ANY = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")

#: Layers are 16-bit numbers, and the largest means that there is no layer.
LAYERS_MAX = (1 << 16) - 1


def layer_index(name: str) -> Optional[int]:
    """The number of a layer in its name, such as ``model.layers.12.self_attn.attn``."""
    match = _AFTER.search(name) or _ANY.search(name)
    if match is None or int(match[1]) >= LAYERS_MAX:
        return None
    return int(match[1])


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A row of blocks. Block ``i`` has ``length`` bytes from ``base + i * stride``."""

    base: int
    stride: int
    length: int


@dataclasses.dataclass(frozen=True)
class Cache:
    """The KV cache of one layer, or one tensor of it."""

    name: str
    layer: int
    start: int
    nbytes: int
    rows: tuple[Blocks, ...]


def caches(kv_caches: Mapping[str, Any], num_blocks: int) -> Iterator[Cache]:
    """The caches in the argument of ``register_kv_caches``. Each value of it is one tensor or several."""
    for position, (name, value) in enumerate(kv_caches.items()):
        layer = layer_index(name)
        for tensor in _tensors(value):
            found = _cache(name, position if layer is None else layer, tensor, num_blocks)
            if found is not None:
                yield found


def regions(found: Iterable[Cache]) -> list[Cache]:
    """The caches whose range overlaps no other cache. The same range under several names of one layer counts once."""
    by_range = {(cache.start, cache.nbytes, cache.layer): cache for cache in found}
    ordered = sorted(by_range.values(), key=lambda cache: (cache.start, cache.nbytes))
    alone: list[Cache] = []
    end = 0
    for index, cache in enumerate(ordered):
        reach = cache.start + cache.nbytes
        following = ordered[index + 1].start if index + 1 < len(ordered) else reach
        if cache.start >= end and following >= reach:
            alone.append(cache)
        end = max(end, reach)
    return alone


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "data_ptr"):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _cache(name: str, layer: int, tensor: Any, num_blocks: int) -> Optional[Cache]:
    size = tensor.element_size()
    shape = tuple(tensor.shape)
    strides = tuple(int(step) * size for step in tensor.stride())
    start = int(tensor.data_ptr())
    if not start or 0 in shape:
        return None
    return Cache(name, layer, start, _span(shape, strides, size), _rows(start, shape, strides, size, num_blocks))


def _span(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    return sum((count - 1) * step for count, step in zip(shape, strides)) + size


def _rows(
    start: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, num_blocks: int
) -> tuple[Blocks, ...]:
    if num_blocks <= 0:
        return ()
    if shape[0] == num_blocks:
        return (Blocks(start, strides[0], _span(shape[1:], strides[1:], size)),)
    if len(shape) > 1 and shape[0] == 2 and shape[1] == num_blocks:  # keys, then values
        length = _span(shape[2:], strides[2:], size)
        return tuple(Blocks(start + part * strides[0], strides[1], length) for part in range(2))
    return ()


def ranges(row: Blocks, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Address and bytes of runs of blocks."""
    for first, count in runs:
        if row.length == row.stride:
            yield row.base + first * row.stride, count * row.stride
        else:
            for block in range(first, first + count):
                yield row.base + block * row.stride, row.length
