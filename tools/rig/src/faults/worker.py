"""A worker of a fault campaign on the C interface (laxity.h), which it calls by ctypes.

It reads commands of one byte: `e` finish, `f` fork a child that sends too, `t` kill a thread that
has submitted. The end of standard input ends it.
"""

import array
import random


class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("mode", ctypes.c_uint32), ("socket", ctypes.c_char_p),
                ("name", ctypes.c_char_p), ("stall_ms", ctypes.c_uint32), ("reattach_ms", ctypes.c_uint32),
                ("attach_ms", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]


class Flow(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("layer", ctypes.c_uint16), ("stage", ctypes.c_uint8),
                ("direction", ctypes.c_uint8), ("nic", ctypes.c_uint8), ("unused", ctypes.c_uint8),
                ("whole", ctypes.c_uint8), ("peer", ctypes.c_uint8), ("reserved", ctypes.c_uint8 * 4),
                ("bytes", ctypes.c_uint64), ("batch", ctypes.c_uint64), ("request", ctypes.c_uint64),
                ("deadline_ns", ctypes.c_uint64)]


class Grant(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint64), ("level", ctypes.c_uint8), ("dscp", ctypes.c_uint8),
                ("last", ctypes.c_uint8), ("bypassed", ctypes.c_uint8), ("reserved", ctypes.c_uint8 * 4)]


class Stats(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("scheduled", ctypes.c_uint32), ("scheduled_bytes", ctypes.c_uint64),
                ("bypassed_bytes", ctypes.c_uint64), ("others", ctypes.c_uint64 * 5)]


Ticket = ctypes.c_uint64 * 8
WIRE_S = 0 if TASK["full_rate"] else 0.002
LAX = ctypes.CDLL(TASK["library"])
for function in ("lax_attach", "lax_lane_open"):
    getattr(LAX, function).restype = ctypes.c_void_p


class Worker(Watched):
    def __init__(self):
        self.outlet, self.stop = Outlet(1), False
        options = Options(ctypes.sizeof(Options), 2, TASK["socket"].encode(), b"worker-c", 0, 20, 0, 0)
        self.client = ctypes.c_void_p(LAX.lax_attach(ctypes.byref(options)))

    def submit(self, lane, ticket, queue, number, size):
        self.outlet.put(b"S", queue, number, size, flag=1)
        stage = (3, 2, 1, 5)[number % 4]
        flow = Flow(ctypes.sizeof(Flow), number % 8, stage, bytes=size, batch=1 + number // 8, request=1 + number // 4)
        LAX.lax_submit(lane, ctypes.byref(flow), ticket)

    def transfer(self, lane, queue, number, size):
        ticket, grant, offset = Ticket(), Grant(), 0
        self.submit(lane, ticket, queue, number, size)
        while not grant.last:
            begin_ns, starved = time.monotonic_ns(), self.starved
            LAX.lax_wait(lane, ticket, ctypes.byref(grant))
            self.report_wait(begin_ns, starved, time.monotonic_ns(), queue)
            if grant.bytes:
                first = (queue & 0xFF) << 56 | (number & 0xFFFFFFFF) << 24 | offset // 8
                words = array.array("Q", range(first, first + grant.bytes // 8))
                self.outlet.put(b"B", queue, number, offset, words.tobytes())
                offset += grant.bytes
            time.sleep(WIRE_S)
            LAX.lax_complete(lane, ticket, ctypes.c_uint64(grant.bytes))
        self.outlet.put(b"D", queue, number)

    def send(self, queue, seed, count=None):
        chance, number = random.Random(seed), 0
        lane = ctypes.c_void_p(LAX.lax_lane_open(self.client))
        while number != count and not self.stop:
            self.transfer(lane, queue, number, 8 * chance.randint(1, 6000 if count is None else 100))
            number += 1
        LAX.lax_lane_close(lane)
        self.outlet.put(b"E", queue, number)

    def fork(self, queue):
        """Forks a child that uses the same client, and passes its frames on."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            LIBC.prctl(1, 9)
            self.outlet, self.stop = Outlet(writer), False
            self.send(queue, queue, count=5)
            os._exit(0)
        os.close(writer)
        whole = b""
        while part := os.read(reader, 65536):
            whole += part
        os.close(reader)
        os.waitpid(child, 0)
        self.outlet.raw(whole)

    def lose_thread(self, queue, lost):
        """Ends its own thread with flows in its lane, without a word to the library. Nobody can join it, so it
        sets `lost` when it has said all."""
        lane = ctypes.c_void_p(LAX.lax_lane_open(self.client))
        tickets = [Ticket() for _ in range(3)]
        for number, ticket in enumerate(tickets):
            self.submit(lane, ticket, queue, number, 64)
        self.outlet.put(b"X", queue)
        lost.set()
        LIBC.syscall(SYS_EXIT, 0)

    def run(self):
        threading.Thread(target=self.watch, daemon=True).start()
        threads = [threading.Thread(target=self.send, args=(queue, TASK["seed"] + queue)) for queue in range(2)]
        for thread in threads:
            thread.start()
        queue, lost = 1000, []
        while (command := os.read(0, 1)) != b"e":
            queue += 1
            if command == b"f":
                threads.append(threading.Thread(target=self.fork, args=(queue,)))
                threads[-1].start()
            elif command == b"t":
                lost.append(threading.Event())
                threading.Thread(target=self.lose_thread, args=(queue, lost[-1]), daemon=True).start()
            else:
                os._exit(0)
        self.stop = True
        for thread in threads:
            thread.join()
        for thread in lost:
            thread.wait()
        stats = Stats(ctypes.sizeof(Stats))
        LAX.lax_get_stats(self.client, ctypes.byref(stats))
        self.outlet.put(b"C", 0, stats.scheduled_bytes, stats.bypassed_bytes)
        # Threads that were ended are not there to be joined.
        os._exit(0)


Worker().run()
