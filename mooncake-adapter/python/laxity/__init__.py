"""Tells the scheduler of network traffic what the serving engine knows.

    import laxity

    laxity.request_begin("chat-17", slo_ttft_s=0.4)
    laxity.batch_begin("step-1", layers=32, layer_time_s=0.002)
    laxity.batch_join("step-1", "chat-17")
    laxity.layer_begin("step-1", 0)
    with laxity.scope(stage=laxity.Stage.P2D, batch="step-1", layer=0, request="chat-17"):
        ...  # all transfers that this thread posts here belong to the request
    laxity.request_end("chat-17")

Every call is safe from any thread, takes about a microsecond, and has no effect without laxityd. A
hint that is invalid raises a subclass of :class:`HintError`. A transfer is never refused.
"""

from ._flow import Flow
from ._laxity import (
    DeadlinePassed,
    Grant,
    HintError,
    RegionOverlap,
    RequestEnded,
    Scope as scope,
    Ticket,
    UnknownLayer,
    attached,
    batch_begin,
    batch_end,
    batch_join,
    batch_queued,
    compute_end,
    layer_begin,
    memory_forget,
    memory_layer,
    memory_owner,
    number,
    request_begin,
    request_deadline_s,
    request_end,
    stats,
    submit,
    version,
)
from ._stage import Stage

__version__ = version()

__all__ = [
    "DeadlinePassed",
    "Flow",
    "Grant",
    "HintError",
    "RegionOverlap",
    "RequestEnded",
    "Stage",
    "Ticket",
    "UnknownLayer",
    "attached",
    "batch_begin",
    "batch_end",
    "batch_join",
    "batch_queued",
    "compute_end",
    "layer_begin",
    "memory_forget",
    "memory_layer",
    "memory_owner",
    "number",
    "request_begin",
    "request_deadline_s",
    "request_end",
    "scope",
    "stats",
    "submit",
    "version",
]
