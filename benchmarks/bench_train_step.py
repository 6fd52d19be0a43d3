"""A training step of a Llama of transformers, stock and on cudnn_ops, and what the GPU does in it.

Eight layers with the sizes of a model of a billion parameters, random bf16 weights; forward with
the model's own loss, and backward. A step's time is the user's: from its call to the end of its
last kernel, with the host's where the GPU waits for it.
"""

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

import cudnn_ops.nn
from benchmarks.harness import OURS, Rows, main, step_ms
from cudnn_ops.integrations.transformers import fuse_rotary_, register

CONFIG = LlamaConfig(
    num_hidden_layers=8,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=8192,
)
SHAPES = ((8, 2048), (2, 8192))  # batch, tokens
PROFILED_STEPS = 2
SHARE = "share of GPU time, %"
# Of two gradients, as a share of the first one's norm: the rounding of every layer is in them.
TOLERANCE = 5e-2
# By parts of a kernel's name, whatever their case; the first that is found counts.
GROUPS = {
    "norms": r"norm|^ln_",  # ours, and cuDNN's
    "gated activation": r"gated",
    "rotary": r"rotary",
    "attention": r"sdpa|flash|fmha|cudnn",
    "matmul": r"gemm|nvjet|xmma|cutlass|cublas|splitk",
    "loss": r"softmax|nll_loss|cross_entropy",
    "embedding": r"embedding|indexselect|gather|grad_weight|scatter|segment|cub::",
    "copies, casts and fills": r"copy|memcpy|memset|fill",
    "other elementwise": r"elementwise",
}


def run(rows: Rows, rounds: int) -> None:
    # A sample is a step of a whole model: long enough that few of them tell.
    rounds = max(rounds // 4, 1)
    models = variants()
    for batch, length in SHAPES:
        torch.manual_seed(0)
        tokens = torch.randint(CONFIG.vocab_size, (batch, length), device="cuda")
        steps = {name: partial(step, model, tokens) for name, model in models.items()}
        verify(steps)
        case = f"{batch}x{length}"
        for name, ms in step_ms(steps, rounds=rounds).items():
            rows.add(case, name, "step_ms", ms)
        times = kernel_times(steps[OURS])
        for group, share in shares(times).items():
            rows.add(f"{case} {group}", OURS, SHARE, share)
        print(f"{case}, the largest of the other kernels: {largest_others(times)}")


def variants(device: str = "cuda") -> dict[str, Any]:
    """The same parameters in each: stock, on cudnn_ops, and both of them compiled."""
    torch.manual_seed(0)
    with torch.device(device):
        stock = AutoModelForCausalLM.from_config(
            CONFIG, attn_implementation="sdpa", dtype=torch.bfloat16
        )
    stock.train()
    # No sequences are packed here, which a compiler cannot see: see `register`.
    register("cudnn_ops_unpacked", packing_under_compile=False)
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation("cudnn_ops_unpacked")
    fuse_rotary_(ours)
    swapped = len(cudnn_ops.nn.replace_modules_(ours))
    # Of each layer two norms and the MLP, and the last norm.
    if swapped != 3 * CONFIG.num_hidden_layers + 1:
        raise RuntimeError(f"{swapped} modules were swapped")
    return {
        "eager": stock,
        "compile": torch.compile(stock, dynamic=False),
        OURS: ours,
        f"{OURS}_compile": torch.compile(ours, dynamic=False),
    }


def step(model: Any, tokens: Tensor) -> Tensor:
    """Forward and backward; a gradient of a parameter far from the loss, behind all attention."""
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    grad: Tensor = model.model.layers[0].self_attn.v_proj.weight.grad
    return grad


def verify(steps: Mapping[str, Callable[[], Tensor]]) -> None:
    """Raise unless all variants have the same gradients."""
    expected = steps["eager"]().float()
    for name, variant in steps.items():
        error = float((variant().float() - expected).norm() / expected.norm())
        if not error <= TOLERANCE:  # written so that NaN fails
            raise RuntimeError(f"{name}: a gradient is {error:.2g} of its norm off")


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds on the GPU in a few calls, by the name of the kernel."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_STEPS):
            call()
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total
        for event in profiled.key_averages()
        # A range that a library has named lies over kernels that count by themselves.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    }


def shares(times: Mapping[str, float]) -> dict[str, float]:
    """Percentages of the whole by group, the largest first."""
    total = sum(times.values())
    if not total:
        raise RuntimeError("the profiler has seen no kernel")
    found = dict.fromkeys([*GROUPS, "other"], 0.0)
    for name, time in times.items():
        found[group_of(name)] += 100 * time / total
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def largest_others(times: Mapping[str, float], number: int = 3) -> list[str]:
    """Names that GROUPS might know."""
    others = [name for name in times if group_of(name) == "other"]
    return sorted(others, key=lambda name: -times[name])[:number]


def group_of(kernel: str) -> str:
    found = (group for group, part in GROUPS.items() if re.search(part, kernel, re.IGNORECASE))
    return next(found, "other")


if __name__ == "__main__":
    main("train_step", run)
