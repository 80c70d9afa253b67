"""An existing program of Mooncake: two processes, KV cache by layers, every byte checked. It is run as it is, and with
the one line changed that says where the Transfer Engine comes from; it knows nothing of Laxity.

    mooncake_example.py target    PORT LAYERS BYTES
    mooncake_example.py initiator PORT LAYERS BYTES
"""

import ctypes
import json
import mmap
import random
import socket
import struct
import sys
import time
import zlib

from mooncake.engine import TransferEngine, TransferOpcode


def engine_with(size):
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("cannot initialise the engine")
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if engine.register_memory(address, size) != 0:
        sys.exit("cannot register memory")
    return engine, memory, address


def hear(connection, size):
    heard = b""
    while len(heard) < size:
        heard += connection.recv(size - len(heard)) or sys.exit("the peer is gone")
    return heard


def connect(port):
    for _ in range(3000):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.02)
    sys.exit("nobody listens")


def target(port, layers, size):
    engine, memory, address = engine_with(layers * size * 2)
    listener = socket.create_server(("127.0.0.1", port))
    # What the initiator will read.
    memory[layers * size :] = random.Random(2).randbytes(layers * size)
    connection, _ = listener.accept()
    connection.sendall(struct.pack("!HQ", engine.get_rpc_port(), address))
    hear(connection, 1)
    connection.sendall(struct.pack("!II", zlib.crc32(memory[: layers * size]), zlib.crc32(memory[layers * size :])))
    hear(connection, 1)
    print(json.dumps({"passed": True}), flush=True)


def initiator(port, layers, size):
    engine, memory, address = engine_with(layers * size * 2)
    memory[: layers * size] = random.Random(1).randbytes(layers * size)
    connection = connect(port)
    rpc_port, remote = struct.unpack("!HQ", hear(connection, 10))
    peer = "127.0.0.1:%d" % rpc_port
    statuses = []

    def place(layer):
        return address + layer * size, remote + layer * size

    for layer in range(layers):
        here, there = place(layer)
        half = size // 2
        if layer % 5 == 0:
            statuses.append(engine.transfer_sync_write(peer, here, there, size))
        elif layer % 5 == 1:
            statuses.append(
                engine.batch_transfer_sync_write(peer, [here, here + half], [there, there + half], [half, size - half])
            )
        elif layer % 5 == 2:
            batch = engine.transfer_submit_write(peer, here, there, size)
            while (status := engine.transfer_check_status(batch)) == 0:
                time.sleep(0.001)
            statuses.append(status - 1)
        elif layer % 5 == 3:
            batch = engine.batch_transfer_async_write(peer, [here, here + half], [there, there + half], [half, size - half])
            statuses.append(engine.get_batch_transfer_status([batch]))
        else:
            statuses.append(engine.transfer_sync(peer, here, there, size, TransferOpcode.Write))
    # Reused blocks, all at once and then one by one.
    back = [place(layers + layer) for layer in range(layers)]
    cut = layers // 2
    many = [back[:cut], back[cut : cut + 1], back[cut + 1 :]]
    heres, theres = zip(*many[0])
    statuses.append(engine.batch_transfer_sync_read(peer, list(heres), list(theres), [size] * cut))
    statuses += [engine.transfer_sync_read(peer, here, there, size) for here, there in many[1]]
    batches = [engine.batch_transfer_async_read(peer, [here], [there], [size]) for here, there in many[2]]
    statuses.append(engine.get_batch_transfer_status(batches))

    connection.sendall(b"?")
    theirs = struct.unpack("!II", hear(connection, 8))
    ours = (zlib.crc32(memory[: layers * size]), zlib.crc32(memory[layers * size :]))
    connection.sendall(b".")
    print(json.dumps({"passed": ours == theirs and not any(statuses), "statuses": statuses}), flush=True)


if __name__ == "__main__":
    role = {"target": target, "initiator": initiator}[sys.argv[1]]
    role(*map(int, sys.argv[2:]))
