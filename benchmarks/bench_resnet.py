"""torchvision's ResNet-50 at 224 x 224: inference with everything folded, and a training step.

bf16, channels last, random weights, torch.backends.cudnn.benchmark on. A call's time is the user's:
from it to the end of its last kernel, with the host's where the GPU waits for it.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet50

from benchmarks.harness import OURS, Rows, main, step_ms
from cudnn_ops.nn import ConvAct2d, fuse_bn_act_, fuse_conv_bn_act_

COMPILERS: Mapping[str, dict[str, Any]] = {
    "compile": {},
    f"compile, {OURS}": {"backend": "cudnn_ops"},
}
INFERENCE_BATCHES = (32, 256)
# Inductor's search takes minutes a batch.
AUTOTUNED_BATCH = 256
# The host is the slower one with the first, the GPU with the second.
TRAINING_BATCHES = (64, 256)
# Of the logits or a gradient, as a share of the first one's norm: 53 layers round to bf16.
TOLERANCE = 1e-1


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    torch.backends.cudnn.benchmark = True
    # A step is one sample, and the host's time moves by a tenth.
    PARTS[part](rows, 2 * rounds)


def make_model() -> nn.Module:
    """With batch norms that have seen something."""
    torch.manual_seed(0)
    model = resnet50()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return model.to("cuda", torch.bfloat16, memory_format=torch.channels_last)


def images(batch: int) -> Tensor:
    drawn = torch.randn(batch, 3, 224, 224, dtype=torch.bfloat16, device="cuda")
    return drawn.contiguous(memory_format=torch.channels_last)


def measure_inference(rows: Rows, rounds: int) -> None:
    model = make_model().eval().requires_grad_(False)
    variants: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: fuse_conv_bn_act_(model),
        "eager": model,
        "compile": torch.compile(model, dynamic=False),
    }
    for batch in INFERENCE_BATCHES:
        x = images(batch)
        if batch == AUTOTUNED_BATCH:
            variants["compile max-autotune"] = torch.compile(
                model, dynamic=False, mode="max-autotune-no-cudagraphs"
            )
        calls = {name: partial(variant, x) for name, variant in variants.items()}
        with torch.no_grad():
            verify(f"inference {batch}", calls)
            add(f"inference, batch {batch}", calls, rows, rounds)


def measure_training(rows: Rows, rounds: int) -> None:
    stock = make_model().train()
    ours = fuse_bn_act_(copy.deepcopy(stock))
    for name, conv in list(ours.named_modules()):
        if type(conv) is nn.Conv2d:
            swapped = ConvAct2d.of(conv, "none", conv.weight, conv.bias)  # type: ignore[arg-type]
            ours.set_submodule(name, swapped)
    variants: dict[str, Any] = {OURS: ours, "eager": stock}
    for name, options in COMPILERS.items():
        variants[name] = torch.compile(stock, dynamic=False, **options)
    for batch in TRAINING_BATCHES:
        x, labels = images(batch), torch.randint(1000, (batch,), device="cuda")
        calls = {name: partial(step, model, x, labels) for name, model in variants.items()}
        verify(f"training {batch}", calls)
        add(f"training, batch {batch}", calls, rows, rounds)


def step(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Forward and backward; the gradient of the last layer, behind all convolutions."""
    model.zero_grad()
    F.cross_entropy(model(x).float(), labels).backward()
    grad = model.get_parameter("fc.weight").grad
    assert grad is not None
    return grad


def verify(case: str, calls: Mapping[str, Callable[[], Tensor]]) -> None:
    """Raise unless all give what torch's eager model does."""
    expected = calls["eager"]().float()
    for name, call in calls.items():
        error = float((call().float() - expected).norm() / expected.norm())
        if not error <= TOLERANCE:  # written so that NaN fails
            raise RuntimeError(f"{case}: {name} is {error:.2g} of the norm off")


def add(case: str, calls: Mapping[str, Callable[[], Tensor]], rows: Rows, rounds: int) -> None:
    for name, ms in step_ms(calls, rounds=rounds).items():
        rows.add(case, name, "step_ms", ms)


PARTS = {"training": measure_training, "inference": measure_inference}

if __name__ == "__main__":
    main("resnet", run, run_part, tuple(PARTS))
