"""One plan, many threads: each call's result is bit for bit what the call gives by itself.

Torch keeps plans apart by thread. Ours are shared: each thread has numbers of its own here, host
scalars included, so that a pointer or a workspace of another's would show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cudnn_ops
from tests.cases import conv, paged
from tests.cases.conv import ConvCase
from tests.cases.paged import PagedCase
from tests.cases.sdpa_features import Features
from tests.conftest import deterministic

_ops = torch.ops.cudnn_ops
THREADS = 8
CALLS = 1000
Call = Callable[[], Sequence[Tensor]]


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().cuda()


def sdpa(number: int) -> Call:
    q, k, v = (draw(number + 100 * i, 2, 4, 128, 64) for i in range(3))
    return lambda: [_ops.sdpa(q, k, v, is_causal=True, scale=0.05 * (number + 1))]


def sdpa_backward(number: int) -> Call:
    q, k, v, grad = (draw(number + 100 * i, 2, 4, 128, 64) for i in range(4))
    options = {"is_causal": True, "scale": 0.05 * (number + 1)}
    saved = _ops.sdpa_with_lse(q, k, v, **options)
    return lambda: _ops._sdpa_backward(grad, q, k, v, *saved, **options)[:3]


def norm(number: int) -> Call:
    x, weight, bias = draw(number, 64, 512), draw(number + 100, 512), draw(number + 200, 512)
    return lambda: [_ops.layer_norm(x, (512,), weight, bias, 0.1 * (number + 1))]


#: cuDNN has a kernel at hand for this ...
NATIVE = ConvCase(2, 32, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1), bias=False)
#: ... and compiles one for this.
COMPILED = replace(NATIVE, activation="silu", bias=True, residual=True)


def convolution(case: ConvCase, number: int) -> Call:
    t = conv.make(case, torch.bfloat16, "cuda", seed=number)
    detached: dict[str, Any] = {name: x if x is None else x.detach() for name, x in vars(t).items()}
    t = conv.Tensors(**detached)
    return lambda: [conv.run(case, t, by=_ops)]


def convolution_backward(number: int) -> Call:
    t = conv.make(NATIVE, torch.bfloat16, "cuda", seed=number)
    x, weight = t.input.detach(), t.weight.detach()
    geometry = _ops._conv_geometry(2, weight, [1, 1], [1, 1], [1, 1], 1)
    mask = [True, True, False, False]
    return lambda: _ops._conv_backward(t.grad_out, x, weight, None, geometry, 0, mask)[:2]


def pages(number: int) -> Call:
    case = PagedCase((1,) * 4, (70 + number, 5, 33, 129), Features(1, 8, 2, 0, 0, 64, 64))
    t = paged.make(replace(case, spare_width=4), torch.bfloat16, "cuda", seed=number)
    # One number of pages and one width of the table, whatever the lengths.
    caches = [torch.cat([c, c.new_zeros(64 - len(c), *c.shape[1:])]) for c in t.arguments[1:3]]
    table = torch.nn.functional.pad(t.page_table, (0, 16 - t.page_table.shape[1]))
    options = t.options | {"scale": 0.05 * (number + 1)}
    return lambda: [_ops.paged_attention(t.query, *caches, table, t.seq_lens_kv, **options)]


CASES: dict[str, Callable[[int], Call]] = {
    "sdpa": sdpa,
    "sdpa_backward": sdpa_backward,
    "norm": norm,
    "conv_native": lambda number: convolution(NATIVE, number),
    "conv_compiled": lambda number: convolution(COMPILED, number),
    "conv_backward": convolution_backward,
    "paged": pages,
}


def differing_calls(make: Callable[[int], Call], calls: int = CALLS) -> list[int]:
    """How many calls of each thread gave something else than the first of all, made alone."""
    problems = [make(number) for number in range(THREADS)]
    expected = [[out.clone() for out in call()] for call in problems]
    torch.cuda.synchronize()
    built = cudnn_ops.cache_info().builds
    barrier = threading.Barrier(THREADS)
    differing = [-1] * THREADS

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            count = torch.zeros((), device="cuda", dtype=torch.int64)
            barrier.wait()
            for _ in range(calls):
                pairs = zip(problems[number](), expected[number], strict=True)
                count += torch.stack([(out != right).any() for out, right in pairs]).any()
            differing[number] = int(count)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cudnn_ops.cache_info().builds == built
    return differing


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_threads_share_a_plan(name, fresh_cache, without_our_decoding):
    with cudnn_ops.using_plan_policy("exact"), deterministic(), torch.no_grad():
        assert differing_calls(CASES[name]) == [0] * THREADS


@pytest.mark.gpu
def test_a_new_thread_has_the_context(tmp_path, fresh_cache):
    """It gets the handle of a thread that has ended, which brings no CUDA context along.

    cuDNN's compiled kernels are loaded, and launched, by the driver, which makes none current.
    """

    def in_thread(call: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    requests = cudnn_ops.plan_requests("rms_norm", ((8192, 4096), torch.bfloat16))
    path = tmp_path / "plans.bundle"
    report = cudnn_ops.build_bundle(requests, "current", path, threads=1, progress=False)
    assert report.left_out == {}
    q = draw(0, 1, 2, 64, 64)
    try:
        plans = cudnn_ops.load_bundle(path).requests
        for _ in range(3):
            cudnn_ops.cache_clear()
            found = cudnn_ops.warmup(plans, threads=1, progress=False)
            assert found == (0, len(plans), 0, {})
            in_thread(lambda: _ops.sdpa(q, q, q))
    finally:
        cudnn_ops.unload_bundle(path)
