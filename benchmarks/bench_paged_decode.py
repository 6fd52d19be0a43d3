"""Decoding over a paged cache: bytes of keys and values read a second, host time, and appending.

bf16, one query a sequence or a few, pages of 16 tokens in random order; lengths alike or drawn from
64 to 4096, in random order or the longest first. `kernel` is the package's own kernel, and `float8`
that kernel over caches of 8 bits, of half as many bytes; both with a plan that is made before, once
for all layers of a step: what it takes is a case of its own. `cudnn_ops` is a call without one, by
that kernel or by cuDNN, as the operator chooses; `cudnn` is by cuDNN.
All keys and values are numbers of 8 bits, so that all results are alike. Peers read the same keys
and values from a contiguous cache: torch's flash backend, for sequences that are all as long; and a
copy on the device, whose bytes are those that it reads and those that it writes. FlashInfer over
the same pages where it is installed.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cudnn_ops
from benchmarks import peers
from benchmarks.harness import OURS, Rows, gpu_ms, host_us, main

PAGE = 16
WIDTH = 256  # of the page table: 4096 tokens
TOKENS_TO_APPEND = 4096
KERNEL, FLOAT8 = "kernel", "float8"  # our own, over caches of 16 and of 8 bits
CUDNN = "cudnn"
#: Who computes, where it is not as was measured: a PagedUse of csrc/ops/attention/paged.
USES = {KERNEL: 2, CUDNN: 1}
# Of two results, as a share of the first one's norm.
TOLERANCE = 2e-2


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    dim: int
    lengths: str
    """How many tokens each sequence has, or "mixed", or "falling": mixed, the longest first."""
    queries: int = 1
    """Of each sequence, causal."""

    def __str__(self) -> str:
        queries = f" {self.queries} queries" if self.queries > 1 else ""
        return f"{','.join(map(str, self[:4]))} {self.lengths}{queries}"

    def draw(self) -> list[int]:
        if self.lengths.isdecimal():
            return [int(self.lengths)] * self.batch
        rng = random.Random(0)
        lengths = [rng.randint(64, 4096) for _ in range(self.batch)]
        return sorted(lengths, reverse=True) if self.lengths == "falling" else lengths

    @property
    def has_contiguous_peer(self) -> bool:
        """Whether torch has attention for it: one query a sequence, and lengths alike."""
        return self.lengths.isdecimal() and self.queries == 1


SHAPES = (
    *(
        Shape(*sizes, lengths)
        for sizes in ((64, 32, 8, 128), (128, 64, 8, 128), (8, 32, 8, 128))
        for lengths in ("2048", "mixed", "falling")
    ),
    *(Shape(64, 32, 8, 128, "2048", queries) for queries in (4, 8)),
)


class Problem(NamedTuple):
    """The queries, and the pages of the keys and values."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    seq_lens_kv: Tensor

    @property
    def kv_bytes(self) -> int:
        tokens = int(self.seq_lens_kv.sum())
        width = self.key_cache.shape[2] * self.key_cache.shape[3]
        return 2 * tokens * width * self.key_cache.element_size()

    def in_float8(self) -> "Problem":
        """The same with caches of 8 bits."""
        keys, values = (x.to(torch.float8_e4m3fn) for x in (self.key_cache, self.value_cache))
        return self._replace(key_cache=keys, value_cache=values)

    def plan(self, is_causal: bool) -> Tensor:
        """What our kernel divides its work by."""
        return cudnn_ops.paged_plan(
            self.query, self.key_cache, self.seq_lens_kv, is_causal=is_causal
        )


def problem(shape: Shape, device: str = "cuda") -> Problem:
    torch.manual_seed(0)
    lengths = shape.draw()
    counts = [-(-length // PAGE) for length in lengths]
    pages = sum(counts)
    order = torch.randperm(pages).int()
    table = torch.zeros(shape.batch, WIDTH, dtype=torch.int32)
    for row, mine in zip(table, order.split(counts), strict=True):
        row[: len(mine)] = mine

    def random_tensor(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    def cache() -> Tensor:
        sizes = (pages, PAGE, shape.kv_heads, shape.dim)
        return random_tensor(*sizes).to(torch.float8_e4m3fn).bfloat16()

    return Problem(
        random_tensor(shape.batch, shape.queries, shape.heads, shape.dim),
        cache(),
        cache(),
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def contiguous(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's attention takes: [B, H, S, D], of sequences that are all as long."""
    length = int(p.seq_lens_kv[0])
    table = p.page_table[:, : -(-length // PAGE)].long()
    keys, values = (
        cache[table].flatten(1, 2)[:, :length].transpose(1, 2)
        for cache in (p.key_cache, p.value_cache)
    )
    return p.query.transpose(1, 2), keys, values


def flashinfer(p: Problem) -> Callable[[], Tensor] | None:
    """Its decode kernel over the same pages, planned; None where it is not installed."""
    try:
        module: Any = import_module("flashinfer")
    except ImportError:
        return None
    counts = -(-p.seq_lens_kv // PAGE)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    pages = torch.cat([r[:n] for r, n in zip(p.page_table, counts.tolist(), strict=True)])
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=p.query.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    last = (p.seq_lens_kv - 1) % PAGE + 1
    heads, kv_heads, dim = p.query.shape[2], p.key_cache.shape[2], p.query.shape[3]
    wrapper.plan(starts, pages, last, heads, kv_heads, dim, PAGE, q_data_type=torch.bfloat16)
    return partial(wrapper.run, p.query[:, 0], (p.key_cache, p.value_cache))


@contextmanager
def around(name: str) -> Iterator[None]:
    """What an implementation is timed within."""
    with peers.backend(name):
        torch.ops.cudnn_ops._paged_use_kernel(USES.get(name, 0))
        try:
            yield
        finally:
            torch.ops.cudnn_ops._paged_use_kernel(0)


def attentions(shape: Shape, p: Problem) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    is_causal = shape.queries > 1
    options: dict[str, Any] = {"is_causal": True} if is_causal else {}
    attend = cudnn_ops.paged_attention
    yield OURS, partial(attend, *p, **options)
    yield KERNEL, partial(attend, *p, **options, plan=p.plan(is_causal))
    yield CUDNN, partial(attend, *p, **options)
    float8 = p.in_float8()
    yield FLOAT8, partial(attend, *float8, **options, plan=float8.plan(is_causal))
    if shape.has_contiguous_peer:
        query, keys, values = contiguous(p)
        yield (
            "torch_flash",
            partial(scaled_dot_product_attention, query, keys, values, enable_gqa=True),
        )
    if shape.queries == 1 and (other := flashinfer(p)) is not None:
        yield "flashinfer", other


def run(rows: Rows, rounds: int) -> None:
    for shape in SHAPES:
        measure(shape, rows, rounds)
    for batch in sorted({shape.batch for shape in SHAPES}):
        measure_plan(batch, rows, rounds)
    measure_append(rows, rounds)


def measure(shape: Shape, rows: Rows, rounds: int) -> None:
    p = problem(shape)
    calls = dict(attentions(shape, p))
    results = {}
    for name, call in calls.items():
        with around(name):
            results[name] = call().float().flatten()
    ours = results[OURS]
    for name, result in results.items():
        error = float((result - ours).norm() / ours.norm())
        if not error <= TOLERANCE:  # written so that NaN fails
            raise RuntimeError(f"{shape}: {name} differs by {error:.2g} of the norm")
    source = torch.empty(p.kv_bytes // 2, dtype=torch.uint8, device=p.query.device)
    target = torch.empty_like(source)
    copy: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for name, ms in gpu_ms({**calls, **copy}, rounds=rounds, around=around).items():
        rows.add(str(shape), name, "gpu_ms", ms)
        read = p.kv_bytes // 2 if name == FLOAT8 else p.kv_bytes
        rows.add(str(shape), name, "tb_per_s", read / ms / 1e9)
    for name, us in host_us(calls, rounds=rounds, around=around).items():
        rows.add(str(shape), name, "host_us", us)


def measure_plan(batch: int, rows: Rows, rounds: int) -> None:
    """What divides the work of a step."""
    p = problem(Shape(batch, 8, 8, 128, "64"))
    calls: dict[str, Callable[[], object]] = {OURS: partial(p.plan, False)}
    for name, ms in gpu_ms(calls, rounds=rounds).items():
        rows.add(f"plan {batch}", name, "gpu_ms", ms)
    for name, us in host_us(calls, rounds=rounds).items():
        rows.add(f"plan {batch}", name, "host_us", us)


def measure_append(rows: Rows, rounds: int) -> None:
    """As many tokens as a prefill step has, in random slots."""
    p = problem(Shape(TOKENS_TO_APPEND // 32, 8, 8, 128, "64"))
    heads, dim = p.key_cache.shape[2:]
    key, value = (
        torch.randn(TOKENS_TO_APPEND, heads, dim, device=p.query.device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    slots = torch.randperm(p.key_cache.shape[0] * PAGE, device=p.query.device)[: len(key)]
    both = torch.stack([key, value])
    target = torch.empty_like(both)
    append = partial(
        torch.ops.cudnn_ops.paged_kv_append_, p.key_cache, p.value_cache, key, value, slots
    )
    case = f"append {TOKENS_TO_APPEND},{heads},{dim}"
    calls: dict[str, Callable[[], object]] = {"cudnn_ops": append}
    both_calls = {**calls, "copy": lambda: target.copy_(both)}
    for name, ms in gpu_ms(both_calls, rounds=rounds).items():
        rows.add(case, name, "gpu_ms", ms)
        rows.add(case, name, "tb_per_s", 2 * both.numel() * 2 / ms / 1e9)
    for name, us in host_us(calls, rounds=rounds).items():
        rows.add(case, name, "host_us", us)


if __name__ == "__main__":
    main("paged_decode", run)
