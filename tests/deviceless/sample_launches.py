"""Launches compute-sanitizer's sample of adaptive norms on an H200 that is not there.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.sample_launches fake_runtime.so

Prints the kernels' names as JSON: which one runs depends on numbers of rows, and a sample that has
too few for one would be found on a GPU alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests import sanitizer_sample
from tests.deviceless.launches import Recorder, describe_gpus, memory

_DEVICE = torch.device("cuda", 0)


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


def main() -> None:
    gpu = next(one for one in describe_gpus() if "H200" in one["deviceName"])
    recorder = Recorder([gpu])
    recorder.listen(sys.argv[1])
    # Random numbers are for memory that there is.
    sanitizer_sample._tensor, sanitizer_sample._backward = _tensor, _backward
    for _, call in sanitizer_sample.adaptive_norms():
        call()
    print(json.dumps(sorted(recorder.launched[0])))


if __name__ == "__main__":
    main()
