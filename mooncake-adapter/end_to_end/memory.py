"""Where the KV caches of a plan lie, alike on both hosts, and what is in them.

    pool       random bytes, the same on both hosts: the store's reused blocks, and what "computing" a block gives
    layers     of each layer the KV caches of all requests: a request's reused blocks, then those that are computed
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
        self.layer_bytes = 0
        for one in planned:
            self._at[one.number] = self.layer_bytes
            self.layer_bytes += shape.kv_bytes(one)
        self.scratch = self.layer(shape.layers)
        self.size = self.scratch + SCRATCH_BYTES
        self._map = mmap.mmap(-1, self.size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view[:POOL_BYTES] = random.Random(1).randbytes(POOL_BYTES)

    def layer(self, layer: int) -> int:
        """Place of a layer's KV caches."""
        return POOL_BYTES + layer * self.layer_bytes

    def cache(self, request: Request, layer: int) -> int:
        """Place of a request's KV cache in a layer."""
        return self.layer(layer) + self._at[request.number]

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
