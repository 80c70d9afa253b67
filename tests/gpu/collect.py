"""Puts the results of tests/gpu/nccl.sh together: `collect.py FOLDER RANKS` prints JSON, `collect.py --table FILE` a table of it."""

import json
import pathlib
import sys

CONFIGURATIONS = ["socket", "passing", "scheduled"]


def sends(folder, name):
    """What the plugin took each send for, summed over the ranks."""
    rows = {}
    path = folder / f"{name}.report"
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8").splitlines():
        for row in json.loads(line)["sends"]:
            key = (row["function"], row["stage"], row["dscp"])
            total = rows.setdefault(key, {})
            for field in ("messages", "bytes", "deferred", "deferred_ns", "bypassed", "overdue"):
                total[field] = total.get(field, 0) + row[field]
    return [
        {"function": function, "stage": stage, "dscp": dscp, **total}
        for (function, stage, dscp), total in sorted(rows.items())
    ]


def collect(folder, ranks):
    document = {"ranks": ranks, "configurations": {}}
    for name in CONFIGURATIONS:
        files = sorted(folder.glob(f"{name}.*.json"))
        if not files:
            continue
        of_ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        first = of_ranks[0]
        document.update({key: first[key] for key in ("gpu", "torch", "nccl")})
        # A collective is done when its last rank is.
        slowest = [
            max((rank["results"][at] for rank in of_ranks), key=lambda row: row["median_s"])
            for at in range(len(first["results"]))
        ]
        document["configurations"][name] = {
            "correct": len(files) == ranks and all(rank["correct"] for rank in of_ranks),
            "results": slowest,
            "sends": sends(folder, name),
        }
    return document


def table(document):
    names = list(document["configurations"])
    print(f"{document['gpu']}, NCCL {document['nccl']}, {document['ranks']} ranks; medians, ms")
    print(f"{'':12}{'bytes':>10}" + "".join(f"{name:>12}" for name in names))
    rows = zip(*(document["configurations"][name]["results"] for name in names), strict=True)
    for row in rows:
        times = "".join(f"{1e3 * one['median_s']:12.3f}" for one in row)
        print(f"{row[0]['operation']:12}{row[0]['bytes']:>10}{times}")
    for name in names:
        for row in document["configurations"][name]["sends"]:
            print(
                f"{name}: {row['messages']} sends of {row['function']} as {row['stage']}, DSCP {row['dscp']}, "
                f"{row['bytes']} bytes, {row['deferred']} waited"
            )


def main():
    if sys.argv[1] == "--table":
        table(json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")))
        return
    document = collect(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
