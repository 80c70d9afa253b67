#!/usr/bin/env python3
"""How should transfers that go in one piece be ordered, and how many of them should be in flight? Prints two tables of
docs/notes/whole-transfers.md.

    tools/sim/fits/whole_transfers.py

Requests arrive at random, and each has one transfer through one port. Transfers in flight share the port, but none gets
more than a share `s` of it: two busy processors or small buffers of a socket can bound a lone transfer. A request is in
time if its transfer ends within three times the request's time alone, less 0.1 s for the first token.
"""

import math
import random
import statistics

RATE = 12.5e6  # bytes/s
GOODPUT = 0.95 * RATE
ARRIVALS = 2.03  # per second
SPAN_S, PREFILL_S, TOKEN_S = 30.0, 0.14, 0.1
BLOCK_TOKENS, TOKEN_BYTES = 128, 16384
SEEDS = 30
SHARES, BEGINS_S = (1.0, 0.65, 0.5), (0.0, 0.05, 0.12)


def requests(seed, begin_s, share, load):
    """`load` is the arrivals per second, and by how much the first token is late on average, which nobody expects."""
    draw, mean = random.Random(seed), {"rate": RATE}
    (arrivals, late_s), late = load, random.Random(seed + 1000)
    at, made = draw.expovariate(arrivals), []
    while at <= SPAN_S:
        tokens = min(768, max(64, draw.lognormvariate(5.4, 0.6)))
        size = (int(tokens / BLOCK_TOKENS) + 1) * BLOCK_TOKENS * TOKEN_BYTES
        due = at + 3 * (PREFILL_S + size / (share * GOODPUT) + begin_s)
        ready = at + PREFILL_S * draw.uniform(0.8, 2.0)
        lone = share * GOODPUT
        made.append({"ready": ready, "size": size, "left": size, "due": due, "lone": lone, "mean": mean})
        made[-1]["token"] = TOKEN_S + (late.expovariate(1 / late_s) if late_s else 0.0)
        at += draw.expovariate(arrivals)
    return sorted(made, key=lambda each: each["ready"])


# Orders: the transfer of those that wait that is next.


def by_size(times):
    """By arrival and size: only those overtake a transfer that arrive within so many times its own time."""
    return lambda waiting, now: min(waiting, key=lambda each: each["ready"] + times * each["size"] / RATE)


def by_deadline(rate):
    """By deadline, those first that can be in time at this rate."""

    def order(waiting, now):
        feasible = [each for each in waiting if now + each["size"] / rate(each) <= each["due"]]
        if feasible:
            return min(feasible, key=lambda each: each["due"])
        return min(waiting, key=lambda each: each["size"])

    return order


by_laxity = by_deadline(lambda each: GOODPUT)
at_lone_rate = by_deadline(lambda each: each["lone"])
at_mean_rate = by_deadline(lambda each: each["mean"]["rate"])


def small_at_mean_rate(waiting, now):
    """Of those that can be in time at the mean rate so far, by arrival and size."""
    feasible = [each for each in waiting if now + each["size"] / each["mean"]["rate"] <= each["due"]]
    return by_size(32)(feasible or waiting, now)



# How many are in flight: when the next may follow, of what is in flight and when all of it leaves at the port's pace.


def at_any_time(flying, paced):
    return 0.0


def at_pace(flying, paced):
    return paced


def while_unfilled(flying, paced):
    """At the pace, and not before one of `n` has taken `n` times its own time."""
    return max(paced, min(each["posted"] + len(flying) * each["size"] / RATE for each in flying))


def in_time(order, most, next_at, begin_s, share, seed, load=(ARRIVALS, 0.0)):
    """Share of requests in time, if at most `most` are in flight."""
    coming, waiting, flying = requests(seed, begin_s, share, load), [], []
    count, now, paced, met = len(coming), 0.0, 0.0, 0
    while coming or waiting or flying:
        while coming and coming[0]["ready"] <= now:
            waiting.append(coming.pop(0))
        then = coming[0]["ready"] if coming else math.inf
        while waiting and len(flying) < most:
            may = next_at(flying, paced) if flying else now
            if may > now:
                then = min(then, may)
                break
            chosen = order(waiting, now)
            waiting.remove(chosen)
            flying.append(chosen)
            chosen["posted"], chosen["begins"] = now, now + begin_s
            paced = max(paced, now) + chosen["size"] / RATE
        moving = [each for each in flying if each["begins"] <= now]
        speed = GOODPUT * min(share, 1 / len(moving)) if moving else 0.0
        then = min([then, *(each["begins"] for each in flying if each["begins"] > now)])
        then = min([then, *(now + each["left"] / speed for each in moving)])
        for each in moving:
            each["left"] -= speed * (then - now)
            if each["left"] <= 1.0:
                flying.remove(each)
                mean = each["mean"]
                mean["rate"] += (each["size"] / (then - each["posted"]) - mean["rate"]) / 8
                met += then + each["token"] <= each["due"]
        now = then
    return met / count


def main():
    rows = [
        ("all share, as without Laxity", (by_size(0), 10**6, at_any_time)),
        ("by arrival, one", (by_size(0), 1, at_pace)),
        ("by arrival, two", (by_size(0), 2, at_pace)),
        ("smallest first, two", (by_size(10**6), 2, at_pace)),
        ("smallest first, overtaking for 8 times, two", (by_size(8), 2, at_pace)),
        ("smallest first, overtaking for 32 times, two", (by_size(32), 2, at_pace)),
        ("**the same, four while unfilled** (hints off)", (by_size(32), 4, while_unfilled)),
        ("earliest deadline, feasible first, one", (by_laxity, 1, at_pace)),
        ("the same, two", (by_laxity, 2, at_pace)),
        ("the same, four while unfilled", (by_laxity, 4, while_unfilled)),
        ("the same, feasible at a lone transfer's rate", (at_lone_rate, 4, while_unfilled)),
        ("**the same, feasible at the mean rate so far** (hints on)", (at_mean_rate, 4, while_unfilled)),
        ("feasible at the mean rate, then by size", (small_at_mean_rate, 4, while_unfilled)),
        ("feasible at the port's rate, two at any time", (by_laxity, 2, at_any_time)),
        ("the same, four at the pace", (by_laxity, 4, at_pace)),
    ]
    table("order, in flight", rows, [f"s = {share:g}" for share in SHARES], lambda how, at: [
        [in_time(*how, begin_s, SHARES[at], seed) for seed in range(SEEDS)] for begin_s in BEGINS_S
    ])
    print()
    loads = [(2.03, 0.0), (2.6, 0.0), (3.2, 0.0), (2.03, 0.4), (2.6, 0.4), (3.2, 0.4)]
    names = [f"{arrivals:g}/s" + (", late" if late_s else "") for arrivals, late_s in loads]
    table("order, in flight", [rows[at] for at in (0, 6, 11, 12)], names, lambda how, at: [
        [in_time(*how, BEGINS_S[1], share, seed, loads[at]) for seed in range(SEEDS)] for share in SHARES
    ])


def table(head, rows, columns, runs):
    print(f"| {head} | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, how in rows:
        means = [[statistics.mean(each) * 100 for each in runs(how, at)] for at in range(len(columns))]
        print(f"| {name} | {' | '.join(' / '.join(f'{mean:.0f}' for mean in cell) for cell in means)} |")


if __name__ == "__main__":
    main()
