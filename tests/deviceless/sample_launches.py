"""Launches compute-sanitizer's sample of adaptive norms on an H200 that is not there.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.sample_launches fake_runtime.so

Prints the kernels' names as JSON: which one runs depends on numbers of rows, and a sample that has
too few for one would be found on a GPU alone. Behind them, which wide rows have their gradients
from blocks whose groups add up what they have of a sample.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import cudnn_ops
from tests import sanitizer_sample
from tests.deviceless.launches import Recorder, describe_gpus, memory

_DEVICE = torch.device("cuda", 0)

#: Tokens, columns, whether there is a gated sum: where a multiprocessor has several rows at once,
#: and where one.
WIDE = tuple(
    (tokens, columns, is_gated)
    for is_gated in (False, True)
    for tokens in (1000, 32_760)
    for columns in (4096, 4104, 5120, 7168)
)


def _tensor(
    *sizes: int, dtype: torch.dtype = torch.float32, shift: int = 0, spare: int = 0
) -> Tensor:
    return memory(_DEVICE, dtype, *sizes, start=shift)


def _backward(out: Tensor | tuple[Tensor, ...], spare: int = 0) -> None:
    results = (out,) if isinstance(out, Tensor) else out
    grads = [memory(_DEVICE, result.dtype, *result.shape) for result in results]
    torch.autograd.grad(results, list(_leaves(results)), grads, allow_unused=True)


def _leaves(results: Sequence[Tensor]) -> Iterator[Tensor]:
    """What has a gradient, without memory for one that it would be added to."""
    waiting, seen = [result.grad_fn for result in results], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += (one for one, _ in node.next_functions)


def goes_by_blocks(recorder: Recorder, tokens: int, columns: int, is_gated: bool) -> bool:
    """Whether the backward of one sample does."""
    x, scale = (memory(_DEVICE, torch.bfloat16, 1, n, columns) for n in (tokens, 1))
    x.requires_grad_()
    recorder.launched[0].clear()
    if is_gated:
        _backward(cudnn_ops.gate_add_adaptive_layer_norm(x, x, scale, scale, scale))
    else:
        _backward(cudnn_ops.adaptive_layer_norm(x, scale, scale))
    return any("backward_blocks" in name for name in recorder.launched[0])


def main() -> None:
    gpu = next(one for one in describe_gpus() if "H200" in one["deviceName"])
    recorder = Recorder([gpu])
    recorder.listen(sys.argv[1])
    # Random numbers are for memory that there is.
    sanitizer_sample._tensor, sanitizer_sample._backward = _tensor, _backward
    for _, call in sanitizer_sample.adaptive_norms():
        call()
    kernels = sorted(recorder.launched[0])
    wide = [(*case, goes_by_blocks(recorder, *case)) for case in WIDE]
    print(json.dumps({"kernels": kernels, "by blocks": wide}))


if __name__ == "__main__":
    main()
