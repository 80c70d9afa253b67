"""A worker of a fault campaign on Mooncake: a target whose memory is written and read, and an initiator that uses
Mooncake's Transfer Engine as applications do, under `laxity.mooncake` or, by its C interface, under
`liblaxity_mooncake.so`.

The second argument is mooncake_c.py. Commands are bytes: `e` finish, `f` fork, `t` end a thread that has submitted. A
local socket (`handle`) beside Mooncake carries what only the test needs: the initiator asks for a place, and says what
Mooncake called complete. The target then looks at its memory.

queue 0: synchronous writes. 1: asynchronous writes, several at a time. 2: reads. From 1000 on: threads that end early.
"""

import contextlib
import importlib.machinery
import importlib.util
import mmap
import random
import socket
import types

POLL_S = 0.0005
#: Places in the memory of both sides. Each holds one transfer.
SLOT = 128 << 10
SLOTS = 8
DEPTH = 4
WRITE_SLOTS, READ_SLOT, LOST_SLOT = range(1, 1 + DEPTH), DEPTH + 1, DEPTH + 2
#: What a place holds when no transfer should be there. No content has this byte first.
NOTHING = b"\xee"
BROKEN = 3
#: Longest time until a forked child has its permits and ends.
CHILD_MAX_S = 10


def load_laxity():
    """Loads the package from its sources and the library that was built."""
    sys.path.insert(0, TASK["sources"])
    loader = importlib.machinery.ExtensionFileLoader("laxity._laxity", TASK["library"])
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module
    loader.exec_module(module)


def content(queue, number, size):
    first = queue << 56 | (number & 0xFFFFFFFF) << 24
    return struct.pack(f"<{size // 8}Q", *range(first, first + size // 8))


class DriverOutlet(Outlet):
    """Mooncake may print, so standard output is moved away."""

    def __init__(self):
        super().__init__(os.dup(1))
        os.dup2(2, 1)

    def end_wrong(self, why):
        """Tells the driver what is wrong, and ends the process."""
        self.put(b"!", 0, payload=why.encode())
        os._exit(BROKEN)


def python_engine():
    from laxity.mooncake import TransferEngine

    return TransferEngine()


class Memory:
    """The slots, known to an engine of Mooncake."""

    def __init__(self, engine):
        self.engine = engine
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            sys.exit("cannot initialise the engine")
        self.map = mmap.mmap(-1, SLOTS * SLOT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if self.engine.register_memory(self.address, SLOTS * SLOT) != 0:
            sys.exit("cannot register memory")
        self.map[:] = NOTHING * (SLOTS * SLOT)

    def put(self, slot, data):
        self.map[slot * SLOT: slot * SLOT + len(data)] = data

    def get(self, slot, size=SLOT):
        return self.map[slot * SLOT: slot * SLOT + size]

    def clear(self, slot):
        self.put(slot, NOTHING * SLOT)


class Target:
    """Serves its memory, and tells the driver what came."""

    def __init__(self, outlet):
        self.outlet, self.memory, self.last = outlet, Memory(python_engine()), {}
        self.open = {0, 1}

    def run(self):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(TASK["handle"])
            listener.listen()
            stream = listener.accept()[0].makefile("rw")
        self.tell(stream, [self.memory.engine.get_rpc_port(), self.memory.address])
        # An initiator that is killed may leave answers unread.
        with contextlib.suppress(ConnectionResetError):
            for line in stream:
                what, *arguments = json.loads(line)
                getattr(self, what)(*arguments)
                self.tell(stream, True)
        for queue in self.open:
            self.outlet.put(b"X", queue)

    def tell(self, stream, answer):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            print(json.dumps(answer), file=stream, flush=True)

    def begin(self, queue, number, slot, size):
        """Says that a transfer is submitted. Its place must be as the last transfer's check left it."""
        found = self.memory.get(slot)
        if found != NOTHING * SLOT and slot in self.last:
            # The oracle knows that this transfer is complete.
            self.outlet.put(b"B", *self.last[slot], 0, found[:8])
        self.last[slot] = queue, number
        self.outlet.put(b"S", queue, number, size, flag=queue == 0)

    def check(self, queue, number, slot, size):
        found = self.memory.get(slot)
        rest = found[size:]
        # Bytes beyond the end are too many for the oracle.
        beyond = 8 if rest != NOTHING * len(rest) else 0
        self.outlet.put(b"B", queue, number, 0, found[: size + beyond])
        self.outlet.put(b"D", queue, number)
        self.memory.clear(slot)

    def fill(self, number, slot, size):
        self.memory.put(slot, content(2, number, size))

    def end(self, queue, count):
        self.outlet.put(b"E", queue, count)
        self.open.remove(queue)


class PeerGone(Exception):
    """The target was killed. Mooncake has to say so, too."""


class Initiator(Watched):
    #: Bytes of the largest transfer, its pieces, and the part of transfers that have less than 8 KiB.
    LARGEST, PIECES, SMALL = SLOT // 2, 3, 0.5
    #: Which of three transfers have hints.
    HINTED = (0,)

    def __init__(self, outlet):
        self.outlet, self.stop = outlet, False
        self.memory, self.lock = Memory(self.make_engine()), threading.Lock()
        self.is_leaving, self.awaited = False, []
        self.engine, self.address = self.memory.engine, self.memory.address
        self.measure_permits()
        self.connect()

    def make_engine(self):
        return python_engine()

    def connect(self):
        connection = socket.socket(socket.AF_UNIX)
        while True:
            try:
                connection.connect(TASK["handle"])
                break
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.002)
        self.stream = connection.makefile("rw")
        port, self.remote = json.loads(self.stream.readline() or "[0, 0]")
        self.peer = f"127.0.0.1:{port}"

    def ask(self, *request):
        with self.lock:
            try:
                print(json.dumps(request), file=self.stream, flush=True)
                answer = self.stream.readline()
            except (BrokenPipeError, ConnectionResetError):
                answer = ""
        if not answer:
            raise PeerGone

    def measure_permits(self):
        """Reports long waits between two permits. Time that Mooncake needs is not part of them."""
        from laxity.mooncake import _deferred, _engine, _gate

        worker = self

        class Gate(_gate.Gate):
            begun = None

            def next(self):
                granted, now = super().next(), time.monotonic_ns()
                if granted is None:
                    self.begun = self.begun or (now, worker.starved)
                elif self.begun is not None:
                    worker.report_wait(*self.begun, now)
                    self.begun = None
                return granted

        def timed(call):
            """Time in which Mooncake looks for a peer is no wait for a permit of another transfer."""

            def run(*arguments):
                begun = time.monotonic()
                try:
                    return call(*arguments)
                finally:
                    worker.starved += time.monotonic() - begun

            return run

        class Deferred(_deferred.Deferred):
            def __init__(self, check):
                super().__init__(timed(check))

            def submit(self, is_write, peer, pieces, start):
                return super().submit(is_write, peer, pieces, timed(start))

        _deferred.Gate = _engine.Gate = Gate
        _engine.Deferred = Deferred

    @contextlib.contextmanager
    def hints(self, queue, number):
        """Some transfers are hinted as a serving engine would."""
        import laxity

        if number % 3 not in self.HINTED:
            yield
            return
        request, batch = f"request {queue} {number}", f"batch {queue} {number}"
        laxity.request_begin(request, slo_ttft_s=0.2)
        laxity.batch_begin(batch, layers=8)
        laxity.batch_join(batch, request)
        with laxity.scope(batch=batch, layer=self.layer(number), request=request):
            yield
        laxity.batch_end(batch)
        laxity.request_end(request)

    def layer(self, number):
        return number % 8

    def place(self, slot):
        return self.address + slot * SLOT, self.remote + slot * SLOT

    def pieces(self, slot, size, count):
        """The lists of a call for several pieces of memory."""
        here, there = self.place(slot)
        cuts = [size * at // count // 8 * 8 for at in range(count)] + [size]
        parts = [(here + a, there + a, b - a) for a, b in zip(cuts, cuts[1:]) if a < b]
        return tuple(list(column) for column in zip(*parts))

    def sizes(self, queue):
        chance = random.Random(TASK["seed"] * 4 + queue)
        while True:
            is_small = chance.random() < self.SMALL
            yield 8 * (chance.randint(1, 1024) if is_small else chance.randint(1024, self.LARGEST // 8))

    def writes(self):
        """Queue 0. Returns the number of its transfers."""
        for number, size in enumerate(self.sizes(0)):
            if self.stop:
                return number
            self.ask("begin", 0, number, 0, size)
            self.memory.put(0, content(0, number, size))
            self.outlet.put(b"S", 0, number, flag=1)
            with self.hints(0, number):
                status = self.write(number, size)
            if status != 0:
                raise PeerGone
            self.outlet.put(b"D", 0, number)
            self.ask("check", 0, number, 0, size)

    def write(self, number, size):
        if number % 2:
            return self.engine.transfer_sync_write(self.peer, *self.place(0), size)
        return self.engine.batch_transfer_sync_write(self.peer, *self.pieces(0, size, self.PIECES))

    def writes_at_once(self):
        """Queue 1."""
        sizes, number, open_writes, free = self.sizes(1), 0, {}, list(WRITE_SLOTS)
        while not (self.stop and not open_writes):
            begun = []
            while free and not self.stop:
                slot, size = free.pop(0), next(sizes)
                self.ask("begin", 1, number, slot, size)
                self.memory.put(slot, content(1, number, size))
                self.outlet.put(b"S", 1, number)
                begun.append((number, slot, size))
                number += 1
            # One right after the other, so that they wait for each other.
            for transfer in begun:
                with self.hints(1, transfer[0]):
                    open_writes[self.submit(*transfer)] = transfer
            for transfer in list(open_writes):
                status = self.engine.transfer_check_status(transfer)
                if status == 0:
                    continue
                if status < 0:
                    raise PeerGone
                done, slot, size = open_writes.pop(transfer)
                # Its end was reported, so it is no transfer any more.
                if self.engine.transfer_check_status(transfer) >= 0:
                    self.outlet.put(b"D", 1, done)
                self.outlet.put(b"D", 1, done)
                self.ask("check", 1, done, slot, size)
                free.append(slot)
            time.sleep(POLL_S)
        return number

    def submit(self, number, slot, size):
        if number % 2:
            transfer = self.engine.transfer_submit_write(self.peer, *self.place(slot), size)
        else:
            transfer = self.engine.batch_transfer_async_write(self.peer, *self.pieces(slot, size, self.PIECES))
        if transfer <= 0:
            raise PeerGone
        return transfer

    def reads(self):
        """Queue 2."""
        for number, size in enumerate(self.sizes(2)):
            if self.stop:
                return number
            self.ask("fill", number, READ_SLOT, size)
            self.memory.clear(READ_SLOT)
            self.outlet.put(b"S", 2, number, size, flag=1)
            with self.hints(2, number):
                status = self.read(number, size)
            if status != 0:
                raise PeerGone
            self.outlet.put(b"B", 2, number, 0, self.memory.get(READ_SLOT, size))
            self.outlet.put(b"D", 2, number)

    def read(self, number, size):
        if number % 3 == 0:
            return self.engine.transfer_sync_read(self.peer, *self.place(READ_SLOT), size)
        pieces = self.pieces(READ_SLOT, size, self.PIECES + 1)
        if number % 3 == 1:
            return self.engine.batch_transfer_sync_read(self.peer, *pieces)
        transfer = self.engine.batch_transfer_async_read(self.peer, *pieces)
        return self.engine.get_batch_transfer_status([transfer])

    def queue(self, queue, send):
        try:
            count = send()
            if queue < 2:
                self.ask("end", queue, count)
            self.outlet.put(b"E", queue, count)
        except PeerGone:
            self.outlet.put(b"X", queue)
            # The driver bounds how long this may take.
            while self.engine.transfer_sync_write(self.peer, *self.place(LOST_SLOT), 8) == 0:
                time.sleep(POLL_S)
        except BaseException as error:
            self.outlet.end_wrong(f"queue {queue}: {error!r}")

    def lose_thread(self, queue, lost):
        """Submits, and ends its own thread without a word to Mooncake or Laxity. Nobody asks for the ends."""
        try:
            for number in range(3):
                self.outlet.put(b"S", queue, number, 64)
                self.engine.transfer_submit_write(self.peer, *self.place(LOST_SLOT), 64)
            self.outlet.put(b"X", queue)
        except BaseException as error:
            self.outlet.end_wrong(f"queue {queue}: {error!r}")
        lost.set()
        LIBC.syscall(SYS_EXIT, 0)

    def start(self, thread, wait):
        """Starts a thread that uses the engine. `wait` returns when it no longer does."""
        with self.lock:
            if not self.is_leaving:
                self.awaited.append(wait)
                thread.start()

    def await_others(self):
        for wait in self.awaited:
            wait()

    def fork(self):
        """Forks a child that asks for permits with its parent's client."""
        import laxity

        child = os.fork()
        if child == 0:
            try:
                LIBC.prctl(1, 9)
                self.in_child()
                ticket = laxity.submit(laxity.Stage.P2D, 4096)
                while not ticket.done and (permit := ticket.wait(5)):
                    ticket.complete(permit.bytes)
                os._exit(0 if ticket.done else 1)
            finally:
                os._exit(1)
        begun = time.monotonic() - self.starved
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() - self.starved > begun + CHILD_MAX_S:
                self.outlet.end_wrong("a forked child hangs")
            time.sleep(WATCH_S)
        if ended[1] != 0:
            self.outlet.end_wrong(f"a forked child ended with {ended[1]}")

    def in_child(self):
        """What a forked child does with the engine of its parent."""

    def run(self):
        import laxity

        threading.Thread(target=self.watch, daemon=True).start()
        for part in range(8 * SLOTS):
            # One call then has several flows.
            laxity.memory_layer(self.address + part * SLOT // 8, SLOT // 8, part % 8, None)
        sends = enumerate((self.writes, self.writes_at_once, self.reads))
        threads = [threading.Thread(target=self.queue, args=queue) for queue in sends]
        for thread in threads:
            thread.start()
        commands = threading.Thread(target=self.obey, daemon=True)
        commands.start()
        for thread in threads:
            thread.join()
        with self.lock:
            self.is_leaving = True
        # The engine must not end under them.
        self.await_others()
        self.leave()

    def leave(self):
        import laxity

        stats = laxity.stats()
        self.outlet.put(b"C", 0, stats["scheduled_bytes"], stats["bypassed_bytes"])
        # Threads that were ended are not there to be joined.
        os._exit(0)

    def obey(self):
        queue = 1000
        while (command := os.read(0, 1)) != b"e":
            queue += 1
            if command == b"f":
                thread = threading.Thread(target=self.fork, daemon=True)
                self.start(thread, thread.join)
            elif command == b"t":
                lost = threading.Event()
                self.start(threading.Thread(target=self.lose_thread, args=(queue, lost), daemon=True), lost.wait)
            else:
                os._exit(0)
        self.await_others()
        self.stop = True


class CInitiator(Initiator):
    """Uses the C interface. Its hints reach `liblaxity.so`, which is preloaded, too."""

    if TASK["alone"]:
        #: More than a window, because what fits into it does not wait. A client that is alone on the port sends what
        #: has no hints on credit, and then little waits. So mostly all have some.
        LARGEST, PIECES, SMALL = SLOT, 12, 0.2
        HINTED = (0, 1, 2) if TASK["seed"] % 4 else (0,)

    def make_engine(self):
        module = types.ModuleType("mooncake_c")
        exec(sys.argv[2], module.__dict__)
        return module.Engine(self)

    def layer(self, _number):
        """Each request has the layer of its memory. Else a transfer is one flow, and one that exceeds the window does
        not wait for it."""

    def measure_permits(self):
        threading.Thread(target=self.engine.watch, daemon=True).start()

    def in_child(self):
        self.engine.ask_in_child()

    def leave(self):
        self.engine.destroy()
        # As a C program ends, with the handlers that write the report.
        LIBC.exit(0)


load_laxity()
if TASK["role"] in ("MooncakeTarget", "MooncakeCTarget"):
    Target(DriverOutlet()).run()
    os._exit(0)
elif TASK["role"] == "MooncakeCInitiator":
    CInitiator(DriverOutlet()).run()
else:
    Initiator(DriverOutlet()).run()
