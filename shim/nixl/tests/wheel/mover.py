"""Moves bytes between two NIXL agents of this process, and prints what arrived and what NIXL said: mover.py [gate].

With `gate`, the agents are those of `laxity.nixl`. Without it, nothing here knows of Laxity.
"""

import ctypes
import glob
import importlib.util
import os
import sys
import time

BYTES, BLOCKS, MANY = 1 << 20, 16, 4


def compiled():
    """NIXL's compiled part. The package around it needs torch in some releases."""
    found = [spec for spec in map(importlib.util.find_spec, ("nixl_cu12", "nixl_cu13")) if spec]
    folder = os.path.dirname(found[0].origin)
    (path,) = glob.glob(os.path.join(folder, "_bindings*.so"))
    spec = importlib.util.spec_from_file_location("_bindings", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nixl = compiled()


def made(name):
    config = nixl.nixlAgentConfig()
    config.useProgThread = True
    agent = nixl.nixlAgent(name, config)
    backend = agent.createBackend("UCX", agent.getPluginParams("UCX")[0])
    memory = ctypes.create_string_buffer(BYTES)
    whole = nixl.nixlRegDList(nixl.DRAM_SEG)
    whole.addDesc((ctypes.addressof(memory), BYTES, 0, b""))
    agent.registerMem(whole, [backend])
    return agent, memory, backend


def blocks(memory):
    size = BYTES // BLOCKS
    listed = nixl.nixlXferDList(nixl.DRAM_SEG)
    for index in range(BLOCKS):
        listed.addDesc((ctypes.addressof(memory) + index * size, size, 0))
    return listed


def wait(agent, handle):
    end = time.monotonic() + 60
    states = []
    while True:
        state = agent.getXferStatus(handle)
        if states[-1:] != [state]:
            states.append(state)
        if state != nixl.NIXL_IN_PROG:
            return state
        assert time.monotonic() < end, "it never ends"
        time.sleep(0.0002)


def main():
    gated = sys.argv[1:] == ["gate"]
    (here, source, _), (there, target, _) = made("here"), made("there")
    here.loadRemoteMD(there.getLocalMD())
    wrapped = here
    if gated:
        from laxity.nixl import Gate

        wrapped = Gate(here, nixl, locked=True)

    ctypes.memset(source, ord("w"), BYTES)
    handle = wrapped.createXferReq(nixl.NIXL_WRITE, blocks(source), blocks(target), "there", b"written", [])
    print("post", wrapped.postXferReq(handle, b"") in (nixl.NIXL_IN_PROG, nixl.NIXL_SUCCESS))
    assert wait(wrapped, handle) == nixl.NIXL_SUCCESS
    print("written", target.raw == b"w" * BYTES)
    notified = {}
    end = time.monotonic() + 60
    while not notified and time.monotonic() < end:
        notified = there.getNotifs({}, [])
    print("notified", notified)

    # The same request again, with other bytes, and its notification at the post.
    ctypes.memset(source, ord("x"), BYTES)
    wrapped.postXferReq(handle, b"again")
    assert wait(wrapped, handle) == nixl.NIXL_SUCCESS
    print("reposted", target.raw == b"x" * BYTES)
    wrapped.releaseXferReq(handle)

    # Half of the prepared blocks, read into the other half's places.
    ctypes.memset(target, ord("r"), BYTES)
    local, remote = wrapped.prepXferDlist("", blocks(source), []), wrapped.prepXferDlist("there", blocks(target), [])
    half = list(range(0, BLOCKS, 2))
    handle = wrapped.makeXferReq(nixl.NIXL_READ, local, half, remote, half, b"", [], False)
    for _ in range(2):
        wrapped.postXferReq(handle, b"")
        assert wait(wrapped, handle) == nixl.NIXL_SUCCESS
    wrapped.releaseXferReq(handle)
    size = BYTES // BLOCKS
    print("read", source.raw == (b"r" * size + b"x" * size) * (BLOCKS // 2))

    # Several at once, of which most have to wait for permits on a slow port.
    ctypes.memset(source, ord("m"), BYTES)
    handles = []
    for _ in range(MANY):
        handles.append(wrapped.createXferReq(nixl.NIXL_WRITE, blocks(source), blocks(target), "there", b"", []))
        wrapped.postXferReq(handles[-1], b"")
    for handle in handles:
        assert wait(wrapped, handle) == nixl.NIXL_SUCCESS
        wrapped.releaseXferReq(handle)
    print("many", target.raw == b"m" * BYTES)

    # Posted, and released without a question.
    handle = wrapped.createXferReq(nixl.NIXL_WRITE, blocks(source), blocks(target), "there", b"", [])
    wrapped.postXferReq(handle, b"")
    for _ in range(1000):
        try:
            wrapped.releaseXferReq(handle)
            break
        except nixl.nixlRepostActiveError:
            time.sleep(0.001)
    print("released")
    wrapped.releasedDlistH(local)
    wrapped.releasedDlistH(remote)
    del wrapped, here, there
    print("destroyed")


main()
