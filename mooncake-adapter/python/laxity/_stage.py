"""What a transfer is for."""

import enum


class Stage(enum.IntEnum):
    """The numbers are those of ``laxity.h``."""

    #: Fetch of reusable KV-cache blocks.
    KV_REUSE = 1
    #: A collective inside a layer.
    COLLECTIVE = 2
    #: Prefill-to-decode transfer of a layer's KV cache.
    P2D = 3
    #: Model weights of a scale-out.
    WEIGHTS = 4
    #: Anything else.
    BACKGROUND = 5
