"""Max pooling: the cases, their tensors, and torch's function in float64 as the reference."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cudnn_ops
from tests.cases import sdpa
from tests.cases.norm import in_flat_buffer

Pair = int | tuple[int, int]


@dataclass(frozen=True)
class MaxPoolCase:
    shape: tuple[int, ...]
    """[N, C, H, W] or [C, H, W]."""
    kernel_size: Pair
    stride: Pair | None = None
    padding: Pair = 0
    dilation: Pair = 1
    ceil_mode: bool = False
    values: str = "random"
    """"random"; "ties": few different numbers; "nan" and "infinite": some of these among them;
    "equal": all of them; "negative"; "least": all minus infinity."""
    layout: str = "last"
    """"last": channels last; "first"; "sliced": every second column; "flat": at an address that is
    no multiple of 16."""
    grad_layout: str = "last"
    """Likewise, of the gradient; or "expanded": one number for all."""

    def __str__(self) -> str:
        words = ["x".join(map(str, self.shape))]
        for letter, numbers in zip("kspd", self.numbers[:4], strict=True):
            words.append(letter + "x".join(map(str, pair_of(numbers))))
        words += ["ceil"] * self.ceil_mode
        return "-".join([*words, self.values, self.layout, self.grad_layout])

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The arguments behind the input."""
        return self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode


def pair_of(numbers: Pair | None) -> tuple[Any, ...]:
    return numbers if isinstance(numbers, tuple) else (numbers,)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in another order of memory."""
    if layout == "last":
        return tensor.movedim(-3, -1).contiguous().movedim(-1, -3)
    if layout == "sliced":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if layout == "flat":
        return in_flat_buffer(tensor)
    if layout == "expanded":
        return tensor.flatten()[:1].view((1,) * tensor.dim()).expand(tensor.shape)
    return tensor.contiguous()


def make(case: MaxPoolCase, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """The input, which wants a gradient."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.shape, generator=generator, dtype=torch.float64)
    some = torch.rand(case.shape, generator=generator)
    if case.values == "ties":
        x = x.round()
    elif case.values == "nan":
        x = x.where(some > 0.1, torch.nan)
    elif case.values == "infinite":
        x = x.where(some > 0.2, torch.inf).where(some < 0.6, -torch.inf)
    elif case.values == "equal":
        x = torch.full_like(x, 1.5)
    elif case.values == "negative":
        x = -x.abs() - 1
    elif case.values == "least":
        x = torch.full_like(x, -torch.inf)
    return laid_out(x.to(dtype).to(device), case.layout).detach().requires_grad_()


def grad_of(case: MaxPoolCase, out: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return laid_out(grad.to(out.dtype).to(out.device), case.grad_layout)


def reference(
    case: MaxPoolCase, x: Tensor, grad_out: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output and gradient, on a CPU: of equal numbers its function takes the first."""
    own = x.detach().cpu().contiguous().to(dtype).requires_grad_()
    out = F.max_pool2d(own, *case.numbers)
    (grad,) = torch.autograd.grad(out, own, grad_out.cpu().contiguous().to(dtype))
    return out.detach(), grad


def check(
    case: MaxPoolCase,
    dtype: torch.dtype,
    device: str,
    within: AbstractContextManager[object] | None = None,
) -> None:
    """Output and gradient against the reference."""
    x = make(case, dtype, device)
    with within or nullcontext():
        out = cudnn_ops.max_pool2d(x, *case.numbers)
        grad_out = grad_of(case, out)
        (grad,) = torch.autograd.grad(out, x, grad_out)
    exact, of_input = reference(case, x, grad_out, torch.float64)
    _, rough = reference(case, x, grad_out, dtype)
    assert out.dtype == grad.dtype == dtype
    # What was chosen is not computed: it is equal.
    assert torch.equal(out.cpu().double().nan_to_num(7.0), exact.nan_to_num(7.0)), f"{case} out"
    sdpa.check(grad.cpu(), of_input, rough, f"{case} grad")


_S = (2, 16, 9, 11)
CASES = [
    MaxPoolCase((3, 64, 12, 10), 3, 2, 1),
    MaxPoolCase((2, 8, 13, 7), 3, 2, 1),
    MaxPoolCase((2, 7, 13, 8), 3, 2, 1),
    MaxPoolCase((2, 1, 8, 9), 3, 2, 1),
    MaxPoolCase(_S, 3, 2, 0),
    MaxPoolCase(_S, 3, 2, 1, ceil_mode=True),
    MaxPoolCase((1, 8, 6, 6), 3, 2, 0, ceil_mode=True),
    MaxPoolCase((4, 64, 8, 6), 2),
    MaxPoolCase(_S, 2, 2, 1),
    MaxPoolCase(_S, 2, 2, ceil_mode=True),
    MaxPoolCase(_S, 3, 1, 1),
    MaxPoolCase(_S, 3),
    MaxPoolCase(_S, 5, 3, 2),
    MaxPoolCase(_S, 5, 2, (2, 1), ceil_mode=True),
    MaxPoolCase(_S, (3, 2), (1, 2), (1, 0)),
    MaxPoolCase(_S, 2, 3),
    MaxPoolCase(_S, 3, 1, 1, 2),
    MaxPoolCase(_S, 3, 2, 1, 2),
    MaxPoolCase(_S, 2, (3, 2), 1, (3, 4), ceil_mode=True),
    MaxPoolCase(_S, (4, 3), 3, (2, 1), (2, 3)),
    MaxPoolCase((1, 8, 1, 1), 1),
    MaxPoolCase((2, 12, 1, 1), 3, 2, 1),
    MaxPoolCase((2, 8, 5, 5), 5),
    MaxPoolCase((2, 24, 17, 19), 13, 1, 6),
    MaxPoolCase((1, 136, 5, 40), 3, 2, 1),
    MaxPoolCase((16, 9, 11), 3, 2, 1),
    MaxPoolCase((5, 9, 11), 2, layout="first"),
    *(
        MaxPoolCase(_S, 3, stride, 1, values=values)
        for stride in (1, 2)
        for values in ("ties", "nan", "infinite", "equal", "negative", "least")
    ),
    MaxPoolCase(_S, 2, values="nan", layout="first"),
    *(
        MaxPoolCase(_S, 3, 2, 1, layout=layout, grad_layout=grad_layout)
        for layout in ("last", "first", "sliced", "flat")
        for grad_layout in ("last", "first", "expanded", "flat")
    ),
    MaxPoolCase((2, 3, 40, 70), 5, 2, 2, layout="first", grad_layout="first"),
    MaxPoolCase((0, 8, 4, 4), 2),
]
