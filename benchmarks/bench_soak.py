"""10,000 distinct shapes in one process: memory of the host and of the device as they go by.

Forward + backward in many families, each with many batches and lengths, more plans than the cache
holds. Memory that grows after the cache is full is a leak.
"""

import random
import resource
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

import cudnn_ops
from benchmarks.harness import Rows, main

SHAPES = 10_000
PER_FAMILY = 50
CACHE_LIMIT = 48
REPORTS = 10


def run(rows: Rows, rounds: int) -> None:
    total = SHAPES if rounds > 10 else 500
    limit = cudnn_ops.cache_info().limit
    cudnn_ops.cache_clear()
    cudnn_ops.set_cache_limit(CACHE_LIMIT)
    cudnn_ops.set_store(None)
    try:
        for count, shape in enumerate(shapes(total), start=1):
            attend(*shape)
            if count % (total // REPORTS) == 0:
                report(rows, count)
    finally:
        cudnn_ops.set_cache_limit(limit)
    info = cudnn_ops.cache_info()
    rows.add(f"{total} shapes", "cudnn_ops", "plans_built", info.builds)
    rows.add(f"{total} shapes, evicted", "cudnn_ops", "plans_built", info.evictions)


def shapes(total: int) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """Batch, query heads, key heads, length, head size, mask: each once, family by family."""
    rng = random.Random(0)
    families = product(range(1, 14), (1, 2), (32, 64, 96, 128), (False, True))
    for kv_heads, group, size, causal in list(families)[: -(-total // PER_FAMILY)]:
        sizes = [(batch, length) for batch in (1, 2) for length in range(16, 1000)]
        for batch, length in rng.sample(sizes, PER_FAMILY):
            yield batch, kv_heads * group, kv_heads, length, size, causal


def attend(batch: int, heads: int, kv_heads: int, length: int, size: int, causal: bool) -> None:
    query, key, value = (
        torch.randn(batch, length, n, size, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    )
    query.requires_grad_()
    out = torch.ops.cudnn_ops.sdpa(query, key, value, is_causal=causal, enable_gqa=True)
    torch.autograd.grad(out, query, out.detach())


def report(rows: Rows, count: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    rows.add(f"after {count} shapes", "cudnn_ops", "device_mib", (total - free) / 2**20)
    rows.add(f"after {count} shapes", "cudnn_ops", "host_mib", resident_bytes() / 2**20)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main("soak", run)
