"""Host time of one small attention call, where the GPU's own time does not matter.

[1, 8, 64, 64] bf16, causal, in both memory orders. The whole call counts, from Python and back.
Ours runs with plans of its own, as for a shape that comes often; `polymorphic` with the plan of a
shape that does not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import cudnn_ops
from benchmarks import peers
from benchmarks.harness import OURS, Functions, Rows, host_us, main

POLYMORPHIC = "polymorphic"
BATCH, HEADS, LENGTH, DIM = 1, 8, 64, 64


def run(rows: Rows, rounds: int) -> None:
    attentions = peers.sdpa("cudnn_ops", "cudnn_ops_function", "torch_cudnn", "torch_flash")
    attentions[POLYMORPHIC] = attentions[OURS]

    def add(case: str, functions: Functions) -> None:
        for name, us in host_us(functions, rounds=rounds, around=settings).items():
            rows.add(case, name, "host_us", us)

    for layout in ("BSHD", "BHSD"):
        *inputs, grad_out = (tensor(layout) for _ in range(4))
        forward = {name: partial(f, *inputs, is_causal=True) for name, f in attentions.items()}
        with torch.no_grad():
            add(f"{layout} forward, no grad", forward)
        for leaf in inputs:
            leaf.requires_grad_()
        add(f"{layout} forward, grad", forward)
        step = {name: partial(training_step, f, inputs, grad_out) for name, f in forward.items()}
        add(f"{layout} forward + backward", step)


@contextmanager
def settings(name: str) -> Iterator[None]:
    policy = cudnn_ops.using_plan_policy("polymorphic" if name == POLYMORPHIC else "exact")
    with peers.backend(name), policy:
        yield


def tensor(layout: str) -> Tensor:
    """[B, H, S, D], in the memory order `layout`."""
    if layout == "BHSD":
        return torch.randn(BATCH, HEADS, LENGTH, DIM, dtype=torch.bfloat16, device="cuda")
    packed = torch.randn(BATCH, LENGTH, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    return packed.transpose(1, 2)


def training_step(
    forward: Callable[[], Tensor], inputs: Sequence[Tensor], grad_out: Tensor
) -> None:
    # With a gradient left from the call before, autograd would add to it with one more kernel.
    for leaf in inputs:
        leaf.grad = None
    forward().backward(grad_out)


if __name__ == "__main__":
    main("host_overhead", run)
