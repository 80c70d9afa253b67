"""What is made of the runs: figures of each, and a table of all."""

from __future__ import annotations

import statistics
from typing import Any

from hints import NONE, OFF, ON

NAMES = {NONE: "no Laxity", OFF: "hints off", ON: "hints on"}


def quantile(values: list[float], q: float) -> float:
    """The smallest value that a part `q` of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-q * len(ordered) // 1) - 1)] if ordered else 0.0


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run, from the results of its prefill process."""
    requests = found["requests"]
    ttft = [one["ttft_s"] for one in requests]
    blocks = [stall for one in requests for stall in one["blocks_s"]]
    collectives = [stall for one in requests for stall in one["collective_s"]]
    stalls = []
    for one in requests:
        waits = one["blocks_s"] or [0.0] * len(one["collective_s"])
        stalls += [first + second for first, second in zip(waits, one["collective_s"])]
    overslept = [late for one in requests for late in one["overslept_s"]]
    in_time = sum(one["done"] and one["ttft_s"] <= one["objective_s"] for one in requests)
    result = {
        "in_time_percent": 100 * in_time / len(requests),
        "ttft_p50_ms": 1e3 * quantile(ttft, 0.5),
        "ttft_p95_ms": 1e3 * quantile(ttft, 0.95),
        # How long this process waited for a processor. It says nothing about the traffic.
        "overslept_mean_ms": 1e3 * statistics.fmean(overslept) if overslept else 0.0,
        "overslept_p95_ms": 1e3 * quantile(overslept, 0.95),
        "requests": len(requests),
        "done": sum(one["done"] for one in requests),
        "wrong": [f"request {one['number']}: {what}" for one in requests for what in one["wrong"]],
    }
    for name, values in ("stall", stalls), ("blocks", blocks), ("collective", collectives):
        result[f"{name}_mean_ms"] = 1e3 * statistics.fmean(values) if values else 0.0
        result[f"{name}_p95_ms"] = 1e3 * quantile(values, 0.95)
    return result


def line(figures: dict[str, Any]) -> str:
    """One run in a line."""
    return (
        f"{figures['in_time_percent']:.0f} % in time, stall {figures['stall_mean_ms']:.1f} ms a layer, "
        f"TTFT {figures['ttft_p50_ms']:.0f} ms, one wait in twenty {figures['overslept_p95_ms']:.1f} ms too long"
    )


#: Heading, and the figures that stand under it.
COLUMNS = (
    ("in time, %", ("in_time_percent",)),
    ("stall a layer, ms: mean", ("stall_mean_ms",)),
    ("stall p95, ms", ("stall_p95_ms",)),
    ("of it blocks", ("blocks_mean_ms",)),
    ("collective", ("collective_mean_ms",)),
    ("TTFT p50, ms", ("ttft_p50_ms",)),
    ("TTFT p95, ms", ("ttft_p95_ms",)),
)


def spread(values: list[float]) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    digits = 0 if high >= 100 else 1
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def table(runs: list[dict[str, Any]]) -> str:
    """Medians over the rounds, with minimum and maximum."""
    variants = [variant for variant in NAMES if any(run["variant"] == variant for run in runs)]
    rows = [["", *(heading for heading, _ in COLUMNS)]]
    for variant in variants:
        of = [run["figures"] for run in runs if run["variant"] == variant]
        cells = [spread([one[key] for one in of]) for _, (key,) in COLUMNS]
        rows.append([NAMES[variant], *cells])
    rows.insert(1, ["---"] * len(rows[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows
    ]
    return "\n".join(lines)


def rounds_won(runs: list[dict[str, Any]], better: str, worse: str, key: str, more: bool) -> tuple[int, int]:
    """Rounds in which one variant was ahead of another by a figure, and rounds that had both."""
    by = {(run["round"], run["variant"]): run["figures"][key] for run in runs}
    rounds = [at for at, variant in by if variant == better and (at, worse) in by]
    won = sum((by[at, better] > by[at, worse]) == more and by[at, better] != by[at, worse] for at in rounds)
    return won, len(rounds)


def disturbances(runs: list[dict[str, Any]]) -> list[str]:
    """Runs that are not calm."""
    return [
        f"the machine was busy in round {run['round'] + 1}, {NAMES[run['variant']]}: one wait in twenty was "
        f"{run['figures']['overslept_p95_ms']:.1f} ms too long; repeat it"
        for run in runs
        if not run["is_calm"]
    ]


def verdict(runs: list[dict[str, Any]]) -> list[str]:
    lines = []
    for better, worse in (ON, OFF), (OFF, NONE):
        said = []
        for what, key, more in (
            ("more requests in time", "in_time_percent", True),
            ("less stall a layer", "stall_mean_ms", False),
        ):
            won, of = rounds_won(runs, better, worse, key, more)
            if of:
                said.append(f"{what} in {won} of {of} rounds")
        if said:
            lines.append(f"{NAMES[better]} against {NAMES[worse]}: " + ", ".join(said))
    return lines
