"""Stands in for the compiled part of :mod:`laxity` where that is not built: the same names, no daemon, and the same
refusals as far as the wrappers can meet them. Tests that pass with it are run with the real one, too."""

import sys
import threading
import types

Stage = None


class HintError(ValueError):
    pass


class UnknownLayer(HintError):
    pass


class RegionOverlap(HintError):
    pass


class RequestEnded(HintError):
    pass


class DeadlinePassed(HintError):
    pass


class Grant:
    def __init__(self, nbytes, level=0, dscp=0, last=True, bypassed=True):
        self.bytes, self.level, self.dscp, self.last, self.bypassed = nbytes, level, dscp, last, bypassed


class Ticket:
    """One that nobody schedules: granted at once."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.granted = 0
        self.completed = 0
        self.cancelled = False

    @property
    def done(self):
        return self.granted == self.nbytes

    def poll(self):
        grant = Grant(self.nbytes - self.granted)
        self.granted = self.nbytes
        return grant

    def wait(self, timeout_s=None):
        return self.poll()

    def complete(self, nbytes):
        if self.completed + nbytes > self.granted:
            raise HintError("more than was granted")
        self.completed += nbytes

    def cancel(self):
        self.cancelled = True


class Scope:
    def __init__(self, *, stage=None, layer=None, batch=None, request=None, deadline_s=None):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


_lock = threading.Lock()
_ended = set()
_layers = {}
_batches = {}


def request_begin(request_id, *, deadline_s=None, slo_ttft_s=None, tenant="", priority=0, bytes=0, traceparent=""):
    if deadline_s is not None and deadline_s <= 0:
        raise DeadlinePassed("deadline_s is not in the future")
    with _lock:
        _ended.discard(request_id)
    return number(request_id)


def number(id):
    return id if isinstance(id, int) else (hash(id) & (2**64 - 1)) or 1


def request_end(request_id):
    with _lock:
        if request_id in _ended:
            raise RequestEnded(f"{request_id} has ended before")
        _ended.add(request_id)


def request_deadline_s(request_id):
    return None


def batch_begin(batch_id, *, layers, layer_time_s=0.0):
    if not 0 < layers < 1 << 16:
        raise UnknownLayer(f"no model has {layers} layers")
    with _lock:
        _batches[batch_id] = layers


def batch_join(batch_id, request_id):
    if request_id in _ended:
        raise RequestEnded(f"{request_id} has ended before")


def batch_queued(batch_id, ahead):
    pass


def layer_begin(batch_id, layer):
    if layer >= _batches.get(batch_id, 1 << 16):
        raise UnknownLayer(f"{batch_id} has no layer {layer}")


def compute_end(batch_id):
    pass


def batch_end(batch_id):
    with _lock:
        _batches.pop(batch_id, None)


def memory_layer(address, nbytes, layer, stage=None):
    with _lock:
        for (start, size), other in _layers.items():
            if start < address + nbytes and address < start + size and other != layer:
                raise RegionOverlap(f"{nbytes} bytes at {address:#x} are layer {other}'s")
        _layers[address, nbytes] = layer


def memory_owner(address, nbytes, *, batch=None, request=None, deadline_s=None):
    if nbytes <= 0:
        raise HintError("no range of memory")


def memory_forget(address, nbytes):
    with _lock:
        _layers.pop((address, nbytes), None)


def submit(
    stage,
    nbytes,
    *,
    layer=None,
    batch=None,
    request=None,
    deadline_s=None,
    peer=None,
    direction="egress",
    whole=False,
    nic=None,
    address=None,
):
    return Ticket(nbytes)


class _Transfers:
    def submit(self, otherwise, nbytes, address, direction, peer, whole=False):
        return Ticket(nbytes)

    def wait_any(self, timeout_s):
        pass


def attached():
    return False


def stats():
    return {"attached": False, "requests": 0}


def version():
    return "0.0.0"


def install():
    """Makes ``import laxity`` work."""
    module = types.ModuleType("laxity._laxity")
    for name, value in globals().items():
        if not name.startswith("__") and name not in ("install", "types", "sys", "threading"):
            setattr(module, name, value)
    sys.modules["laxity._laxity"] = module
