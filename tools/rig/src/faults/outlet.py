"""What workers in Python share. The driver puts it before worker.py and before mooncake.py.

The first argument of a worker is its task as JSON, see task.rs. Frames are those of frame.rs.
"""

import ctypes
import json
import os
import struct
import sys
import threading
import time

WATCH_S = 0.005
REPORTED_NS = 20_000_000
SYS_EXIT = {"x86_64": 60}.get(os.uname().machine, 93)
TASK = json.loads(sys.argv[1])
LIBC = ctypes.CDLL(None)
LIBC.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: a driver that is killed takes its workers with it.


class Outlet:
    """Writes frames to a descriptor, one after another."""

    def __init__(self, descriptor):
        self.descriptor, self.lock = descriptor, threading.Lock()

    def raw(self, data):
        view = memoryview(data)
        with self.lock:
            while view:
                try:
                    view = view[os.write(self.descriptor, view):]
                except BrokenPipeError:
                    os._exit(0)

    def put(self, kind, queue, number=0, value=0, payload=b"", flag=0, starved_ms=0):
        head = struct.pack("<cBHIQQQ", kind, flag, min(starved_ms, 65535), queue, number, value, len(payload))
        self.raw(head + payload)


class Watched:
    """Counts the time in which the process wanted to run and did not. Subclasses have an `outlet`."""

    starved = 0.0

    def watch(self):
        last = time.monotonic()
        while True:
            time.sleep(WATCH_S)
            now = time.monotonic()
            self.starved += max(0.0, now - last - WATCH_S - 0.001)
            last = now

    def report_wait(self, begin_ns, starved, end_ns, queue=0):
        if end_ns - begin_ns > REPORTED_NS:
            # The watching thread runs at least once after the wait.
            time.sleep(2 * WATCH_S)
            starved_ms = int((self.starved - starved) * 1000)
            self.outlet.put(b"W", queue, begin_ns, end_ns, starved_ms=starved_ms)
