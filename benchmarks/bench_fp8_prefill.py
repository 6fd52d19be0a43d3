"""Prefill of a Llama of transformers whose linear layers are of 8 bits, beside 16 bits.

A model with the sizes of Llama 3 8B, random weights, one prompt of 8192 tokens, logits of the last
token. Both have this package's attention, norms and rotary embedding; `cudnn_ops` has also gone
through `convert_to_fp8_`. `error` is that of the logits beside those of the same model in float32,
as a share of their norm: random weights enlarge every rounding from layer to layer, so that an
error says something only beside that of 16 bits.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import cudnn_ops.nn
from benchmarks.harness import OURS, Rows, main, step_ms
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
# A number of 8 bits is rounded by 16 times as much as one of 16, and both factors of a product are.
ROUNDING = 2 * torch.finfo(torch.float8_e4m3fn).eps / torch.finfo(torch.bfloat16).eps


def run(rows: Rows, rounds: int, device: str = "cuda") -> None:
    # A pass of a whole model is long enough that few of them tell, and that the host is ahead: ten
    # of them are more launches than the driver lets wait behind one another.
    rounds = max(rounds // 4, 1)
    torch.manual_seed(0)
    tokens = torch.randint(CONFIG.vocab_size, (1, TOKENS), device=device)
    model = random_model(device)
    exact = exact_logits(model, tokens)
    models = variants(model)
    case = f"prefill of {TOKENS}"
    functions = {name: partial(prefill, model, tokens) for name, model in models.items()}
    errors = verify({name: function() for name, function in functions.items()}, exact)
    for name, error in errors.items():
        rows.add(case, name, "error", error)
    for name, ms in step_ms(functions, rounds=rounds).items():
        rows.add(case, name, "step_ms", ms)


def random_model(device: str) -> Any:
    register()
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            CONFIG, attn_implementation="cudnn_ops", dtype=torch.bfloat16
        ).eval()


def exact_logits(model: Any, tokens: Tensor) -> Tensor:
    """In float32, by torch's attention."""
    wide = copy.deepcopy(model).float()
    wide.set_attn_implementation("sdpa")
    return prefill(wide, tokens)


def variants(model: Any) -> dict[str, Any]:
    """The same parameters in each; those of 8 bits are made at the first call."""
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


def verify(found: dict[str, Tensor], exact: Tensor) -> dict[str, float]:
    """The error of each; raises where that of 8 bits is more than rounding explains."""
    wide = exact.double()
    errors = {
        name: float((logits.double() - wide).norm() / wide.norm()) for name, logits in found.items()
    }
    if not errors[OURS] <= ROUNDING * errors["bf16"]:  # written so that NaN fails
        raise RuntimeError(f"prefill: the logits are off by these shares of their norm: {errors}")
    return errors


if __name__ == "__main__":
    main("fp8_prefill", run)
