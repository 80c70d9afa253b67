"""Prefill-to-decode transfers of the Mooncake Transfer Engine, each with a deadline after its arrival.

  mooncake_p2d.py target    --device rxe1 --port 7473 --bytes 786432 --transfers 20
  mooncake_p2d.py initiator --device rxe0 --port 7473 --bytes 786432 --transfers 20 \
      --period-us 800000 --deadline-us 2000000 --jitter 0.3 --seed 1 --go FILE

The initiator WRITEs transfer i to place i of the target's memory when it arrives, whatever is still
under way, and polls for its end. It says "ready" and begins when the file of --go is there; arrivals
are counted from then on. At the end both ends compare every transfer by its checksum. Each prints one
line of JSON. Nothing here knows of Laxity.
"""

import argparse
import ctypes
import json
import mmap
import os
import random
import socket
import struct
import sys
import time
import zlib

from mooncake.engine import TransferEngine


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["target", "initiator"])
    parser.add_argument("--device", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--transfers", type=int, required=True)
    parser.add_argument("--period-us", type=int, default=0)
    parser.add_argument("--deadline-us", type=int, default=0)
    parser.add_argument("--jitter", type=float, default=0.0, help="of a period")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--go", default="")
    parser.add_argument("--limit-s", type=float, default=120.0)
    return parser.parse_args()


def engine_on(device):
    engine = TransferEngine()
    # Only the handshake uses this address; the data go where the device is.
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", device) != 0:
        sys.exit("cannot initialise the engine on " + device)
    return engine


def memory_of(engine, size):
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if engine.register_memory(address, size) != 0:
        sys.exit("cannot register memory")
    return memory, address


def hear(connection, size):
    heard = b""
    while len(heard) < size:
        piece = connection.recv(size - len(heard))
        if not piece:
            sys.exit("the peer is gone")
        heard += piece
    return heard


def sums(memory, args):
    view = memoryview(memory)
    return [zlib.crc32(view[i * args.bytes : (i + 1) * args.bytes]) for i in range(args.transfers)]


def target(args):
    engine = engine_on(args.device)
    memory, address = memory_of(engine, args.bytes * args.transfers)
    listener = socket.create_server(("127.0.0.1", args.port))
    connection, _ = listener.accept()
    connection.sendall(struct.pack("!HQ", engine.get_rpc_port(), address))
    hear(connection, 1)
    connection.sendall(struct.pack("!%dI" % args.transfers, *sums(memory, args)))
    hear(connection, 1)
    print(json.dumps({"program": "mooncake_p2d", "role": "target", "passed": True}), flush=True)


def connect(port, limit):
    give_up = time.monotonic() + limit
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def quantile(values, q):
    return values[max(0, -int(-q * len(values) // 1) - 1)] if values else 0.0


def initiator(args):
    chance = random.Random(args.seed)
    engine = engine_on(args.device)
    memory, address = memory_of(engine, args.bytes * args.transfers)
    memory[:] = chance.randbytes(len(memory))
    connection = connect(args.port, args.limit_s)
    rpc_port, remote = struct.unpack("!HQ", hear(connection, 10))
    peer = "127.0.0.1:%d" % rpc_port
    # So that connecting the queue pairs is not part of the first transfer.
    if engine.transfer_sync_write(peer, address, remote, 4096) != 0:
        sys.exit("the first write failed")
    phase = chance.random()
    arrivals = sorted(
        (i + phase * (1 - args.jitter) + chance.random() * args.jitter) * args.period_us / 1e6
        for i in range(args.transfers)
    )
    print("ready", flush=True)
    while args.go and not os.path.exists(args.go):
        time.sleep(0.002)

    start = time.monotonic()
    took = [None] * args.transfers
    under_way = []
    arrived = 0
    detail = ""
    while (arrived < args.transfers or under_way) and not detail:
        now = time.monotonic() - start
        if arrived < args.transfers and now >= arrivals[arrived]:
            at = arrived * args.bytes
            batch = engine.transfer_submit_write(peer, address + at, remote + at, args.bytes)
            # Mooncake returns a batch id or a small negative number.
            if batch in (0, -1):
                detail = "transfer %d was not taken" % arrived
            under_way.append((arrived, batch))
            arrived += 1
            continue
        for which, batch in list(under_way):
            status = engine.transfer_check_status(batch)
            if status == 1:
                took[which] = (time.monotonic() - start - arrivals[which]) * 1e6
                under_way.remove((which, batch))
            elif status < 0:
                detail = "transfer %d ended with %d" % (which, status)
        if now > arrivals[-1] + args.limit_s:
            detail = "%d transfers did not end" % len(under_way)
        time.sleep(0.001)
    seconds = time.monotonic() - start

    connection.sendall(b"?")
    theirs = struct.unpack(
        "!%dI" % args.transfers, hear(connection, 4 * args.transfers)
    )
    wrong = [i for i, (ours, other) in enumerate(zip(sums(memory, args), theirs)) if ours != other]
    if wrong and not detail:
        detail = "transfers %s are wrong" % wrong
    connection.sendall(b".")
    done = sorted(us for us in took if us is not None)
    met = sum(us <= args.deadline_us for us in done)
    print(
        json.dumps(
            {
                "program": "mooncake_p2d",
                "role": "initiator",
                "passed": not detail,
                "transfers": args.transfers,
                "met": met,
                "missed": args.transfers - met,
                "deadline_us": args.deadline_us,
                "bytes": args.transfers * args.bytes,
                "seconds": seconds,
                "p50_us": quantile(done, 0.5),
                "p90_us": quantile(done, 0.9),
                "p99_us": quantile(done, 0.99),
                "mean_us": sum(done) / len(done) if done else 0.0,
                "max_us": done[-1] if done else 0.0,
                "detail": detail,
            }
        ),
        flush=True,
    )
    return 0 if not detail else 1


if __name__ == "__main__":
    ours = arguments()
    code = (target if ours.role == "target" else initiator)(ours) or 0
    sys.stdout.flush()
    # Without the engine's own goodbye, which waits for threads; the report is written by atexit of libc.
    sys.exit(code)
