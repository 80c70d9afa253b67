"""One rank of tests/gpu/nccl.sh: collectives from PyTorch, every result checked, times written to $RESULT."""

import json
import os
import statistics
import time

import torch
import torch.distributed as dist

SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26]
ROUNDS = 7


def timed(operation):
    """Median time of an operation, s, and its spread, after one round to warm up."""
    times = []
    for at in range(ROUNDS + 1):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        operation()
        torch.cuda.synchronize()
        if at:
            times.append(time.perf_counter() - began)
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def mixed(rank, count, step):
    """Whole numbers that differ by rank, place and step, so that sums are exact and a piece out of place shows."""
    places = torch.arange(count, device="cuda", dtype=torch.int64)
    return ((places * 7 + rank * 131 + step) % 1021).to(torch.float32)


def all_reduce(rank, ranks, count, step):
    data = mixed(rank, count, step)
    own = data.clone()
    result = timed(lambda: (data.copy_(own), dist.all_reduce(data)))
    expected = sum(mixed(other, count, step) for other in range(ranks))
    assert torch.equal(data, expected), f"all_reduce of {count} is wrong"
    return result


def all_gather(rank, ranks, count, step):
    own = mixed(rank, count, step)
    gathered = torch.empty(count * ranks, device="cuda")
    result = timed(lambda: dist.all_gather_into_tensor(gathered, own))
    expected = torch.cat([mixed(other, count, step) for other in range(ranks)])
    assert torch.equal(gathered, expected), f"all_gather of {count} is wrong"
    return result


def all_to_all(rank, ranks, count, step):
    own = torch.cat([mixed(rank * ranks + to, count, step) for to in range(ranks)])
    received = torch.empty_like(own)
    result = timed(lambda: dist.all_to_all_single(received, own))
    expected = torch.cat([mixed(source * ranks + rank, count, step) for source in range(ranks)])
    assert torch.equal(received, expected), f"all_to_all of {count} is wrong"
    return result


def main():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=os.environ["INIT"], rank=rank, world_size=ranks)
    results = []
    for operation in (all_reduce, all_gather, all_to_all):
        for step, size in enumerate(SIZES):
            count = size // 4
            measured = operation(rank, ranks, count, step)
            results.append({"operation": operation.__name__, "bytes": size, **measured})
    dist.barrier()
    dist.destroy_process_group()
    document = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "correct": True,
        "results": results,
    }
    with open(os.environ["RESULT"], "w", encoding="utf-8") as file:
        json.dump(document, file)


if __name__ == "__main__":
    main()
