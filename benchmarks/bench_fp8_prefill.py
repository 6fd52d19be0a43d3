"""Prefill of a Llama of transformers whose linear layers are of 8 bits, beside 16 bits.

A model with the sizes of Llama 3 8B, random weights, one prompt of 8192 tokens, logits of the last
token. Both have this package's attention, norms and rotary embedding; `cudnn_ops` has also gone
through `convert_to_fp8_`. `error` is that of its logits, as a share of the norm of the others.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import cudnn_ops.nn
from benchmarks.harness import OURS, Rows, gpu_ms, main
from cudnn_ops.integrations.transformers import fuse_rotary_, register

CONFIG = LlamaConfig(
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)
TOKENS = 8192
# What the same check allows small models on a CPU (tests/test_nn_fp8.py).
TOLERANCE = 0.2


def run(rows: Rows, rounds: int) -> None:
    # A sample is a pass of a whole model: long enough that few of them tell.
    rounds = max(rounds // 4, 1)
    models = variants()
    torch.manual_seed(0)
    device = next(models["bf16"].parameters()).device
    tokens = torch.randint(CONFIG.vocab_size, (1, TOKENS), device=device)
    case = f"prefill of {TOKENS}"
    functions = {name: partial(prefill, model, tokens) for name, model in models.items()}
    rows.add(case, OURS, "error", verify(functions[OURS](), functions["bf16"]()))
    for name, ms in gpu_ms(functions, rounds=rounds).items():
        rows.add(case, name, "gpu_ms", ms)


def variants(device: str = "cuda") -> dict[str, Any]:
    """The same parameters in each; those of 8 bits are made at the first call."""
    register()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            CONFIG, attn_implementation="cudnn_ops", dtype=torch.bfloat16
        ).eval()
    parameters: dict[int, Any] = {id(each): each for each in model.parameters()}
    rounded = copy.deepcopy(model, parameters)
    for each in (model, rounded):
        fuse_rotary_(each)
        cudnn_ops.nn.replace_modules_(each)
    converted = len(cudnn_ops.nn.convert_to_fp8_(rounded))
    # Of each layer four projections, two norms and the MLP.
    if converted != 7 * CONFIG.num_hidden_layers:
        raise RuntimeError(f"{converted} modules were converted")
    return {OURS: rounded, "bf16": model}


@torch.no_grad()
def prefill(model: Any, tokens: Tensor) -> Tensor:
    """Logits of the last token, [1, vocabulary]."""
    logits: Tensor = model(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits


def verify(found: Tensor, wanted: Tensor) -> float:
    """The error; raises where it is more than rounding can be."""
    error = float((found - wanted).double().norm() / wanted.double().norm())
    if not error <= TOLERANCE:  # written so that NaN fails
        raise RuntimeError(f"prefill: the logits are {error:.2g} of their norm off")
    return error


if __name__ == "__main__":
    main("fp8_prefill", run)
