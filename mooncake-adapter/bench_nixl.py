"""What `laxity.nixl` costs a transfer of many descriptors, beside what NIXL takes for it in the same calls.

    python mooncake-adapter/bench_nixl.py            # with nixl and numpy; under the daemon that LAXITY_SOCKET names
    LAXITY_BIN=target/release python mooncake-adapter/bench_nixl.py --json FILE    # under a laxityd of its own

Two agents of one process move small pieces of memory over UCX. A transfer is made of two prepared lists, and posted.
`gate` is the processor time of these two calls that is not spent in NIXL. `a descriptor` is the slope between this
number of descriptors and the first one, as a share of the slope of NIXL's post. Its budget is 1 %.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import threading
import time

from bench import own_daemon

COUNTS = (1000, 10_000, 50_000)
BUDGET = 0.01


class Timed:
    """An agent's compiled part that adds up the time of one thread in it."""

    def __init__(self, binding):
        self.binding = binding
        self.thread = threading.get_ident()
        self.ns = 0

    def __getattr__(self, name):
        found = getattr(self.binding, name)

        def call(*args, **named):
            begin = time.thread_time_ns()
            try:
                return found(*args, **named)
            finally:
                if threading.get_ident() == self.thread:
                    self.ns += time.thread_time_ns() - begin

        return call


class Case:
    """A transfer of `count` descriptors, every second of the memory's."""

    def __init__(self, agents, memory, constants, count, nbytes, kind):
        import numpy as np

        self.constants = constants
        self.gate, self.timed = agents[0].agent, agents[0].agent._binding
        self.handles = []
        for name, data in zip(("NIXL_INIT_AGENT", agents[1].name), memory):
            at = np.arange(2 * count, dtype=np.uint64) * nbytes + data.ctypes.data
            rows = np.stack([at, np.full_like(at, nbytes), np.zeros_like(at)], axis=1)
            self.handles.append(agents[0].prep_xfer_dlist(name, rows, "DRAM"))
        indices = np.arange(0, 2 * count, 2, dtype=np.int32)
        self.indices = indices if kind == "array" else indices.tolist()

    def parts(self):
        """Nanoseconds of making it in NIXL and in the gate, and of posting it in both."""
        local, remote = (int(handle._handle) for handle in self.handles)
        took = []
        for step in range(2):
            self.timed.ns, begin = 0, time.thread_time_ns()
            if step == 0:
                write = self.constants.NIXL_WRITE
                handle = self.gate.makeXferReq(write, local, self.indices, remote, self.indices, b"", [], True)
            else:
                self.gate.postXferReq(handle, b"")
            total = time.thread_time_ns() - begin
            took += [self.timed.ns, total - self.timed.ns]
        while self.gate.getXferStatus(handle) != self.constants.NIXL_SUCCESS:
            time.sleep(0.0001)
        self.gate.releaseXferReq(handle)
        return took


def made(nbytes):
    """Two agents under the gate, the first of them timed, and memory of each."""
    import numpy as np

    from laxity import nixl

    agents, memory = [], []
    for name in ("here", "there"):
        agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        data = np.zeros(2 * COUNTS[-1] * nbytes, dtype=np.uint8)
        agent.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
        agents.append(agent)
        memory.append(data)
    agents[0].add_remote_agent(agents[1].get_agent_metadata())
    constants = sys.modules[type(agents[0].agent._binding).__module__]
    agents[0].agent._binding = Timed(agents[0].agent._binding)
    return agents, memory, constants


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--bytes", type=int, default=64, help="of a descriptor")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--indices", choices=("array", "list"), default="array", help="what names the descriptors")
    arguments = parser.parse_args()
    os.environ.setdefault("LAXITY_NIXL", "gate")
    folder = os.environ.get("LAXITY_BIN")
    with own_daemon(folder) if folder else contextlib.nullcontext():
        import laxity

        attached = laxity.attached()
        agents, memory, constants = made(arguments.bytes)
        cases = [Case(agents, memory, constants, n, arguments.bytes, arguments.indices) for n in COUNTS]
        rounds = [[case.parts() for case in cases] for _ in range(arguments.rounds)]
    print("under a daemon" if attached else "without a daemon")
    names = "".join(f"{name:>14}" for name in ("NIXL make", "post", "gate make", "post"))
    print(f"{'descriptors':>12}{names}{'of post':>10}{'a descriptor':>15}")
    report = []
    for place, count in enumerate(COUNTS):
        medians = [statistics.median(each[place][part] for each in rounds) for part in range(4)]
        nixl_make, gate_make, nixl_post, gate_post = medians
        case = {"descriptors": count, "nixl_ns": [nixl_make, nixl_post], "gate_ns": [gate_make, gate_post]}
        case["of_post"] = (gate_make + gate_post) / nixl_post
        report.append(case)
        slope = ""
        if place:
            further = sum(case["gate_ns"]) - sum(report[0]["gate_ns"])
            share = further / (nixl_post - report[0]["nixl_ns"][1])
            case["of_post_a_descriptor"] = share
            slope = f"{share * 100:.2f} %" + (" over" if share > BUDGET else "")
        times = "".join(f"{ns / 1000:11.1f} µs" for ns in (nixl_make, nixl_post, gate_make, gate_post))
        print(f"{count:12}{times}{case['of_post'] * 100:8.2f} %{slope:>15}")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps({"attached": attached, "cases": report}) + "\n")
    # NIXL's agents must not be destroyed in Python's order.
    os._exit(0)


if __name__ == "__main__":
    main()
