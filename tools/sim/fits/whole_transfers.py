#!/usr/bin/env python3
"""How many transfers that go in one piece should be in flight? Prints the table of docs/notes/whole-transfers.md.

    tools/sim/fits/whole_transfers.py

Requests arrive at random, and each has one transfer through one port. Transfers in flight share the port. A request is
in time if its transfer ends within three times the request's time alone, less 0.1 s for the first token.
"""

import random
import statistics

RATE = 12.5e6  # bytes/s
GOODPUT = 0.95 * RATE
ARRIVALS = 2.03  # per second
SPAN_S, PREFILL_S, TOKEN_S, STEP_S = 30.0, 0.14, 0.1, 0.002
BLOCK_TOKENS, TOKEN_BYTES = 128, 16384


def requests(seed, begin_s):
    draw = random.Random(seed)
    at, made = draw.expovariate(ARRIVALS), []
    while at <= SPAN_S:
        tokens = min(768, max(64, draw.lognormvariate(5.4, 0.6)))
        size = (int(tokens / BLOCK_TOKENS) + 1) * BLOCK_TOKENS * TOKEN_BYTES
        due = at + 3 * (PREFILL_S + size / GOODPUT + begin_s)
        made.append({"ready": at + PREFILL_S * draw.uniform(0.8, 2.0), "size": size, "left": size, "due": due})
        at += draw.expovariate(ARRIVALS)
    return made


def next_of(waiting, by_laxity, now):
    if not by_laxity:
        return waiting[0]
    feasible = [each for each in waiting if now + each["size"] / GOODPUT <= each["due"]]
    if feasible:
        return min(feasible, key=lambda each: each["due"])
    return min(waiting, key=lambda each: each["size"])


def in_time(by_laxity, most, is_paced, begin_s, seed):
    """Share of requests in time, if `most` are in flight, each but the first at the port's pace if `is_paced`."""
    every = requests(seed, begin_s)
    coming, waiting, flying = sorted(every, key=lambda each: each["ready"]), [], []
    now, pace, ended, met = 0.0, 0.0, 0, 0
    while ended < len(every) and now < 3 * SPAN_S:
        while coming and coming[0]["ready"] <= now:
            waiting.append(coming.pop(0))
        while waiting and (not flying or (len(flying) < most and (now >= pace or not is_paced))):
            chosen = next_of(waiting, by_laxity, now)
            waiting.remove(chosen)
            flying.append(chosen)
            chosen["begins"] = now + begin_s
            pace = now + chosen["size"] / RATE
        moving = [each for each in flying if each["begins"] <= now]
        now += STEP_S
        for each in moving:
            each["left"] -= GOODPUT * STEP_S / len(moving)
            if each["left"] <= 0:
                flying.remove(each)
                ended += 1
                met += now + TOKEN_S <= each["due"]
    return met / len(every)


def main():
    rows = [
        ("all share, as without Laxity", (False, 10**6, False)),
        ("by arrival, one", (False, 1, True)),
        ("by arrival, two, the second at the port's pace", (False, 2, True)),
        ("least time left, feasible first, one", (True, 1, True)),
        ("**least time left, feasible first, two, the second at the port's pace**", (True, 2, True)),
        ("the same, two at any time", (True, 2, False)),
    ]
    print("| order, in flight | L = 0 | L = 50 ms | L = 120 ms |\n|---|---|---|---|")
    for name, how in rows:
        means = [statistics.mean(in_time(*how, begin_s, seed) for seed in range(10)) for begin_s in (0.0, 0.05, 0.12)]
        print(f"| {name} | {' | '.join(f'{mean * 100:.0f}' for mean in means)} |")


if __name__ == "__main__":
    main()
