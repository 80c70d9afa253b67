"""Where the KV caches of a plan lie, alike on both hosts, and what is in them.

    pool       random bytes, the same on both hosts: the store's reused blocks, and what "computing" a block gives
    caches     of each request, by layers: its reused blocks, then those that are computed
    scratch    for the first transfer, which opens connections
"""

from __future__ import annotations

import ctypes
import mmap
import random
import zlib

from workload import Request, Shape

POOL_BYTES = 8 << 20
SCRATCH_BYTES = 4096
#: Steps through the pool, in blocks; prime, so that layers and requests differ.
STRIDE = 37


class Memory:
    def __init__(self, shape: Shape, planned: list[Request]) -> None:
        self._shape = shape
        self._at = {}
        size = POOL_BYTES
        for one in planned:
            self._at[one.number] = size
            size += shape.layers * shape.kv_bytes(one)
        self.scratch = size
        self.size = size + SCRATCH_BYTES
        self._map = mmap.mmap(-1, self.size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view[:POOL_BYTES] = random.Random(1).randbytes(POOL_BYTES)

    def cache(self, request: Request, layer: int) -> int:
        """Place of a layer's KV cache: the reused blocks, then the computed ones."""
        return self._at[request.number] + layer * self._shape.kv_bytes(request)

    def source(self, request: Request, layer: int, nbytes: int) -> int:
        """Place in the pool of what the layer has reused, or computed."""
        step = (request.number * 64 + layer) * STRIDE * self._shape.block_bytes
        return step % (POOL_BYTES - nbytes + 1)

    def crc(self, place: int, nbytes: int) -> int:
        return zlib.crc32(self.view[place : place + nbytes])

    def compute(self, request: Request, layer: int) -> None:
        """Puts there what the layer's computation would: the blocks that are new."""
        nbytes = request.new * self._shape.block_bytes
        to = self.cache(request, layer) + self._shape.reused_bytes(request)
        source = self.source(request, layer, nbytes)
        self.view[to : to + nbytes] = self.view[source : source + nbytes]
