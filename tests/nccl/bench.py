#!/usr/bin/env python3
"""bench.py RELEASE_FOLDER [--json FILE]: what the NCCL net plugin's sockets move, as ratios within one run.

Bandwidth: nccl_perf through the plugin, against iperf3 with as many streams, in turns, over loopback. Overhead of gating: the plugin
under a laxityd with nothing else to schedule, against the same plugin passing through (LAXITY_MODE=off), in turns, for bandwidth and for
the round trip of 8 bytes.
Medians and quartiles of ROUNDS rounds; a machine that is not quiet shows in the quartiles.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS = 7
SECONDS = 3
HERE = pathlib.Path(__file__).resolve().parent


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high], "all": values}


def lines(command, **environment):
    environment = {key: value for key, value in environment.items() if value is not None}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LAXITY_", "NCCL_"))}
    done = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        sys.exit(f"bench: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def plugin(tools, library, streams, pings, **environment):
    """Gbit/s and the median round trip in µs."""
    command = [tools / "nccl_perf", "-p", library, "-b", 1 << 20, "-w", 8, "-n", streams, "-t", SECONDS, "-i", pings]
    out = lines([str(part) for part in command], NCCL_SOCKET_IFNAME="lo", LAXITY_NET="tcp", **environment)
    return json.loads(out.splitlines()[-1])


def iperf3(streams):
    """Gbit/s received."""
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", "5299"], stdout=subprocess.DEVNULL)
    time.sleep(0.3)
    command = ["iperf3", "-c", "127.0.0.1", "-p", "5299", "-P", str(streams), "-t", str(SECONDS), "-O", "1", "-l", "1M", "-J"]
    out = lines(command)
    server.wait(timeout=30)
    return json.loads(out)["end"]["sum_received"]["bits_per_second"] / 1e9


def daemon(release, folder):
    config = folder / "laxityd.toml"
    config.write_text('[[nic]]\nname = "lo"\nrate = "400Gbit"\n', encoding="utf-8")
    socket = folder / "laxityd.sock"
    process = subprocess.Popen(
        [release / "laxityd", "--config", config, "--socket", socket, "--control", folder / "control.sock"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    for _ in range(100):
        if socket.exists():
            return process, socket
        time.sleep(0.05)
    sys.exit("bench: laxityd does not start")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("release", type=pathlib.Path)
    arguments.add_argument("--json", type=pathlib.Path)
    given = arguments.parse_args()
    library = given.release / "libnccl_net_laxity.so"
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run([HERE / "build.sh", folder], check=True, stdout=subprocess.DEVNULL)
        for streams in (1, 2, 4):
            ours, theirs = [], []
            for at in range(ROUNDS):
                print(f"\rbench: {streams} stream(s), round {at + 1} of {ROUNDS} ", end="", file=sys.stderr)
                ours.append(plugin(folder, library, streams, 0, LAXITY_MODE="off")["gbit_per_s"])
                theirs.append(iperf3(streams))
            ratio = spread([a / b for a, b in zip(ours, theirs, strict=True)])
            results.append({"what": f"bandwidth, {streams} stream(s), against iperf3", "ours": spread(ours), "reference": spread(theirs), "ratio": ratio, "unit": "Gbit/s"})
        process, socket = daemon(given.release, folder)
        try:
            gated, free, gated_us, free_us = [], [], [], []
            for at in range(ROUNDS):
                print(f"\rbench: gating, round {at + 1} of {ROUNDS}        ", end="", file=sys.stderr)
                with_daemon = plugin(folder, library, 1, 5000, LAXITY_SOCKET=str(socket))
                without = plugin(folder, library, 1, 5000, LAXITY_MODE="off")
                gated.append(with_daemon["gbit_per_s"])
                free.append(without["gbit_per_s"])
                gated_us.append(with_daemon["latency_us"]["p50"])
                free_us.append(without["latency_us"]["p50"])
        finally:
            process.terminate()
            process.wait()
        print("\r" + " " * 50 + "\r", end="", file=sys.stderr)
        for what, unit, one, other in (
            ("bandwidth under laxityd, against passing through", "Gbit/s", gated, free),
            ("round trip of 8 bytes under laxityd, against passing through", "µs", gated_us, free_us),
        ):
            ratio = spread([a / b for a, b in zip(one, other, strict=True)])
            results.append({"what": what, "ours": spread(one), "reference": spread(other), "ratio": ratio, "unit": unit})
    print(f"{'':62}{'ours':>9}{'reference':>11}{'ratio':>8}  quartiles")
    for row in results:
        low, high = row["ratio"]["quartiles"]
        print(
            f"{row['what']:62}{row['ours']['median']:9.2f}{row['reference']['median']:11.2f}"
            f"{row['ratio']['median']:8.3f}  {low:.3f}–{high:.3f}  {row['unit']}"
        )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
