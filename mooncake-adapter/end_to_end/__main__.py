"""Serving end to end: Mooncake moves layer-wise KV caches between two hosts while collectives share their link, without
Laxity, under it without hints, and with them.

    LAXITY_BIN=target/release PYTHON mooncake-adapter/end_to_end
    LAXITY_BIN=target/release PYTHON mooncake-adapter/end_to_end --rounds 5 --json FILE --trace FOLDER

PYTHON is that of an environment with the wheel of `make wheel` and mooncake-transfer-engine-non-cuda. LAXITY_BIN has laxityd
and laxity. Two network namespaces are made (as root, or where the kernel allows user namespaces) and go away at
the end; exit status 75 says that they can't be. docs/serving.md has how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import network
import report
from daemons import Daemon, plain_environment
from guest import Guest
from hints import NONE, VARIANTS
from network import Network
from plan import Plan
from workload import Shape, offered, requests

HERE = pathlib.Path(__file__).resolve().parent
ROLES = ("prefill", "decode")
#: How long anything may take beyond its time.
LIMIT_S = 120.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=os.environ.get("LAXITY_BIN"), help="folder of laxityd and laxity [$LAXITY_BIN]")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="variants to run, of none, off, on [all]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with other arrivals [3]")
    parser.add_argument("--requests", type=int, default=150, help="requests in a round [150]")
    parser.add_argument("--attempts", type=int, default=3, help="maximum number of tries of a run while the machine is busy; the calmest counts [3]")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round; each further round adds one [1]")
    parser.add_argument("--load", type=float, default=0.7, help="load of the prefill host's egress port [0.7]")
    parser.add_argument("--slo-scale", type=float, default=3.0, help="objective, in times that a request takes alone [3]")
    parser.add_argument("--rate-mbit", type=int, default=200, help="rate of the link in each direction [200]")
    parser.add_argument("--chunk-kib", type=int, default=32, help="the daemons' chunk [32]")
    parser.add_argument("--window-kib", type=int, default=128, help="the daemons' window [128]")
    parser.add_argument("--units", type=int, default=2, help="prefill units [2]")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model [8]")
    parser.add_argument("--block-bytes", type=int, default=4096, help="bytes of a block's KV cache in a layer [4096]")
    parser.add_argument("--rdma", action="store_true", help="use Mooncake's RDMA transport, inside `laxity lab exec`")
    parser.add_argument("--preload", default="", help="with --rdma: a library for both processes, such as the lab's patient.so")
    parser.add_argument("--json", type=pathlib.Path, help="all figures, into this file")
    parser.add_argument("--trace", type=pathlib.Path, help="folder for traces of one more run of each variant that has a daemon")
    given = parser.parse_args()
    given.variants = [one for one in given.variants.split(",") if one]
    if unknown := set(given.variants) - set(VARIANTS):
        parser.error(f"--variants: {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    for name in ("rounds", "attempts", "requests", "load", "slo_scale", "rate_mbit", "chunk_kib", "window_kib", "units", "layers", "block_bytes"):
        if getattr(given, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} has to be more than 0")
    needed = ("laxityd", "laxity") if given.trace or given.rdma else ("laxityd",)
    if given.rdma or set(given.variants) - {NONE}:
        missing = [name for name in needed if not given.bin or not (pathlib.Path(given.bin) / name).exists()]
        if missing:
            parser.error(f"no {missing[0]} in {given.bin!r}: name the folder of the binaries with --bin or LAXITY_BIN")
    return given


class Lab:
    """Plays plans."""

    def __init__(self, given: argparse.Namespace, hosts: Network | Guest, folder: pathlib.Path) -> None:
        self._given, self._hosts, self._folder = given, hosts, folder
        self._runs = 0

    def plan(self, shape: Shape, seed: int) -> Plan:
        given, hosts = self._given, self._hosts
        planned = requests(shape, given.requests, given.load, given.slo_scale, seed)
        return Plan(shape, planned, hosts.place(0), hosts.place(1), hosts.transport, LIMIT_S)

    def play(self, plan: Plan, variant: str, trace: pathlib.Path | None = None) -> dict[str, Any]:
        """One run of one variant."""
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        plan.write(folder / "plan.json")
        daemons = []
        if variant != NONE:
            for host, role in enumerate(ROLES):
                nic = self._nic(self._hosts.nic(host))
                inside = self._hosts.inside(host)
                daemons.append(Daemon(pathlib.Path(self._given.bin), folder / role, inside, nic))
                if trace is not None:
                    daemons[-1].trace(trace / f"{variant}.{role}.json")
        processes = []
        try:
            for host in (1, 0):
                said = open(folder / f"{ROLES[host]}.log", "w+", encoding="utf-8")
                command = [*self._hosts.inside(host), sys.executable, str(HERE / "host.py")]
                if daemons:
                    command = [*self._hosts.under_laxity(daemons[host].socket), *command]
                processes.append((ROLES[host], said, subprocess.Popen(
                    [*command, ROLES[host], str(folder / "plan.json"), variant],
                    stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
                    env=self._environment(daemons[host].socket if daemons else None),
                )))
            found = self._wait(processes, plan.requests[-1].arrival_s + 2 * plan.limit_s)
            by_stage = {role: daemon.bytes_by_stage() for role, daemon in zip(ROLES, daemons)}
        finally:
            for _, said, process in processes:
                process.kill()
                process.wait()
                said.close()
            traced = [daemon.close().strip() for daemon in daemons]
        figures = report.figures(found["prefill"])
        chunk_ms = self._given.chunk_kib * 1024 / plan.shape.rate_bytes_s * 1e3
        return {
            "variant": variant,
            "figures": figures,
            # Waits that are out by less than a chunk takes say little of the machine.
            "is_calm": figures["overslept_p95_ms"] <= chunk_ms,
            "permitted_bytes": by_stage,
            "trace": traced if trace is not None else None,
            **found,
        }

    def _nic(self, name: str) -> str:
        given = self._given
        return (
            f'name = "{name}"\nrate = "{given.rate_mbit}Mbit"\n'
            f'chunk = "{given.chunk_kib}KiB"\nwindow = "{given.window_kib}KiB"'
        )

    def _environment(self, daemon: pathlib.Path | None) -> dict[str, str]:
        more = {"MC_LOG_LEVEL": "WARNING", "PYTHONDONTWRITEBYTECODE": "1", **self._hosts.environment()}
        if daemon is not None:
            # Few processors for many processes: one that is slow to answer is not one that hangs.
            more.update(LAXITY_SOCKET=str(daemon), LAXITY_ATTACH_MS="20000", LAXITY_STALL_MS="20000")
        return plain_environment(**more)

    def _wait(self, processes: list[Any], limit_s: float) -> dict[str, Any]:
        """What each found, once both have ended; neither waits for one that failed."""
        give_up = time.monotonic() + limit_s
        while any(process.poll() is None for _, _, process in processes):
            failed = any(process.returncode for _, _, process in processes)
            if failed or time.monotonic() > give_up:
                break
            time.sleep(0.02)
        found = {}
        for role, said, process in processes:
            said.seek(0)
            lines = said.read().splitlines()
            if process.poll() != 0:
                continue
            found[role] = json.loads(lines[-1])
        if len(found) < len(processes):
            for role, said, process in processes:
                said.seek(0)
                print(f"--- {role}, exit status {process.poll()}:\n{said.read()[-4000:]}", file=sys.stderr)
            sys.exit("end_to_end: a process failed, or took too long")
        return found


def main() -> None:
    given = arguments()
    if not given.rdma:
        network.enter()
    shape = Shape(given.layers, given.block_bytes, given.rate_mbit * 1e6 / 8, given.units)
    runs, traced, loads = [], [], []
    hosts = Guest(pathlib.Path(given.bin), given.preload) if given.rdma else Network(given.rate_mbit)
    with tempfile.TemporaryDirectory(prefix="laxity-end-to-end-") as name:
        lab = Lab(given, hosts, pathlib.Path(name))
        try:
            for at in range(given.rounds):
                plan = lab.plan(shape, given.seed + at)
                loads.append(offered(shape, plan.requests))
                # In turns, each first as often as the others: what else the machine does meets all alike.
                first = at % len(given.variants)
                for variant in given.variants[first:] + given.variants[:first]:
                    tried: list[dict[str, Any]] = []
                    while not any(run["is_calm"] for run in tried) and len(tried) < given.attempts:
                        tried.append({"round": at, "attempts": len(tried) + 1, **lab.play(plan, variant)})
                        said = report.line(tried[-1]["figures"])
                        print(f"round {at + 1} of {given.rounds}, {report.NAMES[variant]}: {said}", file=sys.stderr)
                    runs.append(min(tried, key=lambda run: run["figures"]["overslept_p95_ms"]))
            if given.trace:
                given.trace.mkdir(parents=True, exist_ok=True)
                for variant in given.variants:
                    if variant != NONE:
                        print(f"once more, with a trace: {report.NAMES[variant]}", file=sys.stderr)
                        traced.append(lab.play(lab.plan(shape, given.seed), variant, given.trace))
        finally:
            hosts.close()
    print(report.table(runs))
    print()
    for line in report.verdict(runs):
        print(line)
    means = {key: sum(load[key] for load in loads) / len(loads) for key in loads[0]}
    print("offered: " + ", ".join(f"{key} {value:.0%}" for key, value in means.items()))
    for warning in hosts.warnings + report.disturbances(runs):
        print("warning: " + warning)
    if given.json:
        settings = {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(given).items()}
        told = {"settings": settings, "shape": dataclasses.asdict(shape), "offered": loads, "warnings": hosts.warnings}
        given.json.write_text(json.dumps({**told, "runs": runs, "traced": traced}) + "\n", encoding="utf-8")
    wrong = [what for run in runs + traced for what in run["figures"]["wrong"]]
    wrong += ["a collective at the decode host"] * sum(run["decode"]["wrong_collectives"] for run in runs + traced)
    undone = sum(run["figures"]["requests"] - run["figures"]["done"] for run in runs + traced)
    if wrong or undone:
        sys.exit(f"end_to_end: {undone} requests were not served; wrong bytes: {wrong[:5] or 'none'}")


if __name__ == "__main__":
    main()
