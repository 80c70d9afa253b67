"""What a hint costs from Python, beside an empty call of the same extension in the same run.

    python mooncake-adapter/bench.py            # under the daemon that LAXITY_SOCKET names, if there is one
    LAXITY_BIN=target/release python mooncake-adapter/bench.py    # under a laxityd of its own
    python mooncake-adapter/bench.py --json FILE

Each figure is the median over many short rounds, in which all take turns: whatever else the machine does meets
all of them alike. The budget is three microseconds a hint; an empty call tells what of that is Python's.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS, CALLS = 301, 200
BUDGET_NS = 3000


@contextlib.contextmanager
def own_daemon(folder):
    """A laxityd from `folder`, with sockets of its own."""
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        config = place / "laxityd.toml"
        config.write_text(f'socket = "{place}/s"\ncontrol = "{place}/c"\nmetrics = ""\n')
        command = [pathlib.Path(folder) / "laxityd", "--config", config]
        daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not (place / "s").exists():
                if daemon.poll() is not None:
                    sys.exit(f"{command[0]} ended at once")
                time.sleep(0.01)
            os.environ["LAXITY_SOCKET"] = str(place / "s")
            yield
        finally:
            daemon.kill()
            daemon.wait()


def cases():
    import laxity
    from laxity import Stage
    from laxity._laxity import _empty

    laxity.batch_begin("b", layers=64, layer_time_s=0.002)
    laxity.request_begin("r", slo_ttft_s=1000)
    laxity.batch_join("b", "r")
    scope = laxity.scope(stage=Stage.P2D, batch="b", request="r", layer=3)
    numbers = iter(range(1, 1 << 62))

    def one_life():
        number = next(numbers)
        laxity.request_begin(number, slo_ttft_s=10.0)
        laxity.request_end(number)

    def in_scope():
        with scope:
            pass

    def grant():
        ticket = laxity.submit(Stage.COLLECTIVE, 64)
        ticket.complete(ticket.wait().bytes)

    # Name, call, calls of the extension in it, and whether it is a hint.
    return [
        ("empty call", lambda: _empty("b", 3), 1, False),
        ("layer_begin", lambda: laxity.layer_begin("b", 3), 1, True),
        ("batch_join", lambda: laxity.batch_join("b", "r"), 1, True),
        ("request_begin + request_end", one_life, 2, True),
        ("memory_owner", lambda: laxity.memory_owner(0x10000, 4096, request="r"), 1, True),
        ("with scope", in_scope, 2, True),
        ("submit + wait + complete", grant, 3, False),
    ]


def measure(all_cases):
    took = {name: [] for name, *_ in all_cases}
    clock = time.perf_counter_ns
    for _ in range(ROUNDS):
        for name, call, inside, _ in all_cases:
            begin = clock()
            for _ in range(CALLS):
                call()
            took[name].append((clock() - begin) / CALLS / inside)
    return {name: statistics.median(values) for name, values in took.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    folder = os.environ.get("LAXITY_BIN")
    with own_daemon(folder) if folder else contextlib.nullcontext():
        import laxity

        attached = laxity.attached()
        all_cases = cases()
        medians = measure(all_cases)
    empty = medians["empty call"]
    print("under a daemon" if attached else "without a daemon")
    print(f"{'':30}{'ns a call':>12}{'× empty':>10}")
    for name, _, _, is_hint in all_cases:
        over = "  over budget" if is_hint and medians[name] > BUDGET_NS else ""
        print(f"{name:30}{medians[name]:12.0f}{medians[name] / empty:10.1f}{over}")
    if arguments.json:
        report = {"attached": attached, "median_ns": medians, "budget_ns": BUDGET_NS}
        pathlib.Path(arguments.json).write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
