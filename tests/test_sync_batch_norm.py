"""Batch norm over several processes computes and learns what one does of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from cudnn_ops.nn import SyncBatchNorm
from cudnn_ops.ops.batch_norm import BatchNormActivation
from tests.distributed.processes import BACKENDS, device, run_in_processes

C = 6
#: Samples of each process.
SHARES = {
    "even": (3, 3),
    "uneven": (1, 4),
    "one is empty": (0, 3),
    "four": (2, 1, 0, 3),
    "one value each": (1, 1),
}


def _tensors(samples: int, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (samples, C, *sizes)
    x, residual, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    weight, bias = torch.randn(2, C, generator=generator, dtype=torch.float64)
    x = x * 2 + 3
    return tuple(tensor.to(dtype) for tensor in (x, residual, grad, weight, bias))


def _train(
    shares: tuple[int, ...],
    sizes: tuple[int, ...],
    activation: BatchNormActivation,
    has_residual: bool,
    is_last: bool,
    dtype: torch.dtype,
) -> list[Any]:
    """What a process computes: its results, its gradients, and the statistics."""
    rank = distributed.get_rank()
    x, residual, grad, weight, bias = _tensors(sum(shares), sizes, dtype)
    x, residual, grad = (tensor.split(shares)[rank].to(device()) for tensor in (x, residual, grad))
    if is_last:
        x = x.contiguous(memory_format=torch.channels_last)
    norm = SyncBatchNorm(C, momentum=0.3, activation=activation, device=device()).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)
    x.requires_grad_()
    residual.requires_grad_()
    out = norm(x, residual if has_residual else None)
    leaves = [x, norm.weight, norm.bias, *([residual] if has_residual else [])]
    grads = torch.autograd.grad(out, leaves, grad)
    assert out.stride() == x.stride() or out.numel() == 0
    frozen = norm(x.detach())  # without a gradient
    assert frozen.shape == x.shape
    return [out.detach(), *grads, norm.running_mean, norm.running_var]


def _expected(
    shares: tuple[int, ...], sizes: tuple[int, ...], activation: str, has_residual: bool
) -> list[Tensor]:
    """Of one process with the whole batch, in float64, after the second step too."""
    x, residual, grad, weight, bias = _tensors(sum(shares), sizes, torch.float64)
    leaves = [x, weight, bias, *([residual] if has_residual else [])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    mean, var = torch.zeros(C).double(), torch.ones(C).double()
    out = F.batch_norm(x, mean, var, weight, bias, True, 0.3)
    if has_residual:
        out = out + residual
    if activation == "relu":
        out = out.relu()
    grads = torch.autograd.grad(out, leaves, grad)
    F.batch_norm(x, mean, var, weight, bias, True, 0.3)
    return [out.detach(), *grads, mean, var]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHARES)
def test_as_one_process(name, backend):
    shares = SHARES[name]
    is_one = name == "one value each"
    sizes = () if is_one else (4, 3)
    options = [("relu", True, not is_one), ("none", False, False)]
    for activation, has_residual, is_last in options:
        arguments = (shares, sizes, activation, has_residual)
        expected = _expected(*arguments)
        found = run_in_processes(
            _train, len(shares), *arguments, is_last, torch.float32, backend=backend
        )
        joined = [torch.cat([one[i] for one in found]) for i in (0, 1)]
        sums = [sum(one[i] for one in found) for i in (2, 3)]
        joined += [*sums, *([torch.cat([one[4] for one in found])] if has_residual else [])]
        if is_one:  # of two values the gradients are differences of equal numbers
            joined[1:], expected[1:4] = joined[2:], expected[2:4]
        for mine, right in zip(joined, expected[:-2], strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4)
        for one in found:
            for mine, right in zip(one[-2:], expected[-2:], strict=True):
                torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)


def _train_mixed(is_autocast: bool) -> list[Tensor]:
    """In half precision, with float32 parameters; and under DDP."""
    rank = distributed.get_rank()
    x = _tensors(6, (4, 3), torch.float32)[0].split((2, 4))[rank].to(device())
    own = SyncBatchNorm(C, activation="relu", device=device())
    norm = nn.parallel.DistributedDataParallel(own)
    with torch.autocast(device().type, torch.bfloat16, enabled=is_autocast):
        # The sum is float32, as torch's.
        out = norm(x.bfloat16(), x if is_autocast else None)
    assert out.dtype == (torch.float32 if is_autocast else torch.bfloat16)
    out.float().square().sum().backward()
    grads = [parameter.grad for parameter in own.parameters()]
    return [tensor for tensor in (*grads, own.running_var) if tensor is not None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_autocast", [False, True])
def test_half_precision_under_ddp(is_autocast, backend):
    found = run_in_processes(_train_mixed, 2, is_autocast, backend=backend)
    torch.testing.assert_close(*found)  # each has the mean of both
    x = _tensors(6, (4, 3), torch.float32)[0]
    low = x.bfloat16().float()
    weight, bias = (torch.full((C,), float(i), requires_grad=True) for i in (1, 0))
    out = F.batch_norm(low, None, None, weight, bias, True)
    out = (out + x if is_autocast else out).relu()
    grads = torch.autograd.grad(out.square().sum(), (weight, bias))
    for mine, right in zip(found[0], grads, strict=False):
        torch.testing.assert_close(mine * 2, right, rtol=2e-2, atol=0.5)


def _subgroup() -> Any:
    """Two groups of two, each with statistics of its own; and eval mode, which asks nobody."""
    rank = distributed.get_rank()
    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    norm = SyncBatchNorm(C, process_group=groups[rank // 2])
    x = torch.full((2, C), float(rank)) + torch.arange(2.0).unsqueeze(1)
    norm(x)
    if rank == 0:
        norm.eval()(x)
    return norm.running_mean


def test_groups():
    found = run_in_processes(_subgroup, 4)
    for rank, mean in enumerate(found):
        of_group = 0.5 + (0.5 if rank < 2 else 2.5)
        torch.testing.assert_close(mean, torch.full((C,), 0.1 * of_group))


class _Block(nn.Module):
    """A convolution, and the norm with what is added behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(C, C, 3, padding=1)
        self.norm = SyncBatchNorm(C, activation="relu")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x), x)
        return out


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = model(x)
    grads = torch.autograd.grad(out.sin().sum(), [x, *model.parameters()])
    return [out.detach(), *grads, *(buffer.clone() for buffer in model.buffers())]


def _compiled(shares: tuple[int, ...], compiler: str, is_dynamic: bool) -> list[float]:
    """How far a compiled step is from one in eager mode, the second one of another size."""
    rank = distributed.get_rank()
    # Convolutions in another layout round to TF32 in other places.
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model = _Block().to(device())
    stock = copy.deepcopy(model)
    compiled: Any = torch.compile(
        model, backend=compiler, fullgraph=True, dynamic=is_dynamic or None
    )
    differences = []
    for turn in range(2):
        samples = [share * (turn + 1) for share in shares]
        x = torch.randn(sum(samples), C, 5, 4).split(samples)[rank].to(device())
        for mine, right in zip(_step(compiled, x), _step(stock, x), strict=True):
            assert mine.shape == right.shape
            if right.numel() > 0:
                largest = 1 + right.abs().max().item()
                differences.append((mine - right).abs().max().item() / largest)
    return differences


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "compiler", "is_dynamic"),
    [
        ("uneven", "aot_eager", True),
        ("one is empty", "aot_eager", False),
        ("four", "aot_eager", False),
        ("even", "inductor", False),
        ("uneven", "cudnn_ops", True),
    ],
)
def test_compiled_as_one_graph(name, compiler, is_dynamic, backend):
    shares = SHARES[name]
    for found in run_in_processes(
        _compiled, len(shares), shares, compiler, is_dynamic, backend=backend
    ):
        assert max(found) < 1e-4


def _compiled_under_ddp() -> list[Tensor]:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = _Block().to(device())
    stock = copy.deepcopy(model)
    x = torch.randn(6, C, 5, 4).split((2, 4))[rank].to(device())
    found = []
    for one in (model, stock):
        parallel = nn.parallel.DistributedDataParallel(one)
        call = torch.compile(parallel, backend="aot_eager") if one is model else parallel
        call(x).sin().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_under_ddp(backend):
    for mine, right in run_in_processes(_compiled_under_ddp, 2, backend=backend):
        assert mine.numel() == sum(p.numel() for p in _Block().parameters())
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def _mistakes() -> list[str]:
    norm = SyncBatchNorm(C)
    with pytest.raises(ValueError, match=r"running_mean must be \[5\]"):
        norm(torch.ones(2, 5))
    distributed.barrier()  # the other one may still be connecting
    return ["raised"]


def test_mistakes_are_told_before_anyone_waits():
    assert run_in_processes(_mistakes, 2) == [["raised"]] * 2


def _twice() -> list[str]:
    norm, x = SyncBatchNorm(C), torch.randn(3, C, requires_grad=True)
    (grad,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()
    return ["raised"]


def test_double_backward_is_refused():
    assert run_in_processes(_twice, 2) == [["raised"]] * 2
