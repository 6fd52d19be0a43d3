"""Layers and vision transformers of `cudnn_ops.nn`, beside the models that they stand for.

bf16. A layer of a transformer of transformers' (attention by torch's function), torchvision's and
timm's vision transformers; ours have the same weights. `cudnn_ops` is the module as it is, and in
`compile, cudnn_ops` it is compiled, too. A step is one call, in training with its backward, from an
idle GPU to the end of its last kernel. Results and the input's gradient are held to the model in
float32: at most twice the error of eager mode.

`products` are torch's kernels for the products and the attention of eager mode's step, attention by
cuDNN, and nothing else. Where torch.compile takes only a little longer, little is left to gain.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import OURS, Rows, main, step_ms
from benchmarks.whole_models import allowed_errors, hold
from benchmarks.zoo_models import vision_transformer
from cudnn_ops.nn import TransformerBlock, VisionTransformer

BOUND = "products"
_PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"),
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    )
}
_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
#: What a layer's parameters are called in ours, by what they are called in transformers.
Names = Mapping[str, str]
LLAMA: Names = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn.o_proj": "attention.o_proj",
    "self_attn.": "attention.qkv.",
}
QWEN3: Names = {
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    **LLAMA,
}
BERT: Names = {
    "attention.self.query": "attention.qkv.q_proj",
    "attention.self.key": "attention.qkv.k_proj",
    "attention.self.value": "attention.qkv.v_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}


def renamed(key: str, names: Names) -> str:
    """The key in our ``state_dict`` for one of theirs."""
    for theirs, ours in names.items():
        if key.startswith(theirs):
            return ours + key.removeprefix(theirs)
    return key


class Case(NamedTuple):
    """A module of ours and its model.

    Attributes:
        name: with the batch and the length, or the images.
        theirs: makes the model.
        ours: makes ours, without its weights.
        names: of parameters.
        shape: of the input.
        head_size: of queries and keys that turn; 0 where they do not.
    """

    name: str
    theirs: Callable[[], nn.Module]
    ours: Callable[[], nn.Module]
    names: Names
    shape: tuple[int, ...]
    head_size: int = 0


def _decoder(name: str, kind: str, config: str, **sizes: Any) -> nn.Module:
    hf = import_module("transformers")
    settings = getattr(hf, config)(**sizes, attn_implementation="sdpa")
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    made: nn.Module = getattr(module, kind)(settings, layer_idx=0)
    return made


_DECODER: dict[str, Any] = {"norm": "rms", "gated": True, "mlp_bias": False, "is_causal": True}


def decoder_case(
    name: str,
    kind: tuple[str, str, str],
    names: Names,
    sizes: tuple[int, int, int, int, int],
    shape: tuple[int, int],
    **ours: Any,
) -> Case:
    """A layer of a decoder: width, heads, heads of the keys, head size, and width of the MLP."""
    width, heads, heads_kv, head_size, hidden = sizes
    theirs: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "head_dim": head_size,
    }
    options = {**_DECODER, "kv_heads": heads_kv, "head_dim": head_size, **ours}
    return Case(
        f"{name}, {shape[0]} x {shape[1]}",
        partial(_decoder, *kind, **theirs),
        partial(TransformerBlock, width, heads, hidden, **options),
        names,
        (*shape, width),
        head_size,
    )


def _bert(width: int, heads: int) -> nn.Module:
    return _decoder(
        *("bert", "BertLayer", "BertConfig"),
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def encoder_case(name: str, width: int, heads: int, shape: tuple[int, int]) -> Case:
    """A layer of BERT, nothing dropped."""
    ours = partial(TransformerBlock, width, heads, 4 * width, order="post", eps=1e-12, bias=True)
    case = f"{name}, {shape[0]} x {shape[1]}"
    return Case(case, partial(_bert, width, heads), ours, BERT, (*shape, width))


def vision_case(
    name: str, theirs: Callable[[], nn.Module], batch: int, image_size: int = 224, **ours: Any
) -> Case:
    """A vision transformer; ``ours`` has the sizes that are not those of ViT-B/16."""
    make = partial(VisionTransformer, image_size, **ours)
    shape = (batch, 3, image_size, image_size)
    return Case(f"{name}, {batch} images", theirs, make, {}, shape)


def _timm(name: str) -> nn.Module:
    made: nn.Module = import_module("timm").create_model(name)
    return made


_LLAMA = ("llama", "LlamaDecoderLayer", "LlamaConfig")
_QWEN3 = ("qwen3", "Qwen3DecoderLayer", "Qwen3Config")
CASES = (
    decoder_case("Llama 3 8B", _LLAMA, LLAMA, (4096, 32, 8, 128, 14336), (2, 4096)),
    decoder_case("Llama 3.2 1B", _LLAMA, LLAMA, (2048, 32, 8, 64, 8192), (8, 1024)),
    decoder_case("Qwen3 1.7B", _QWEN3, QWEN3, (2048, 16, 8, 128, 6144), (4, 2048), qk_norm="rms"),
    encoder_case("BERT base", 768, 12, (64, 512)),
    encoder_case("BERT large", 1024, 16, (32, 384)),
    vision_case("ViT-B/16", partial(vision_transformer, torch.device("cpu")), 128),
    vision_case(
        "timm ViT-L/16",
        partial(_timm, "vit_large_patch16_224"),
        64,
        **{"dim": 1024, "depth": 24, "heads": 16, "hidden": 4096},
    ),
)
PARTS = [case.name for case in CASES]


def run(rows: Rows, rounds: int) -> None:
    for part in PARTS:
        run_part(part, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    case = next(case for case in CASES if case.name == part)
    for trains in (False, True):
        torch._dynamo.reset()
        measure(case, trains, rows, rounds)


def measure(case: Case, trains: bool, rows: Rows, rounds: int, device: str = "cuda") -> None:
    """Check all of them, then add the rows."""
    name = f"{case.name}, {'training' if trains else 'inference'}"
    steps: dict[str, Callable[[], object]] = {**checked_steps(name, case, trains, device)}
    steps[BOUND] = products(steps["eager"])
    if device == "cuda":
        for impl, ms in step_ms(steps, rounds=rounds).items():
            rows.add(name, impl, "step_ms", ms)


def checked_steps(
    name: str, case: Case, trains: bool, device: str
) -> dict[str, Callable[[], list[Tensor]]]:
    """A step of each implementation, whose results are right."""
    torch.manual_seed(0)
    exact = case.theirs().to(device).train(trains)
    theirs = copy.deepcopy(exact).to(torch.bfloat16)
    with torch.device(device):
        ours = case.ours().to(torch.bfloat16).train(trains)
    ours.load_state_dict({renamed(k, case.names): v for k, v in theirs.state_dict().items()})
    models: dict[str, Any] = {
        OURS: ours,
        "eager": theirs,
        "compile": torch.compile(theirs, dynamic=False),
        f"compile, {OURS}": torch.compile(ours, dynamic=False, backend="cudnn_ops"),
    }
    x = torch.randn(case.shape, device=device, dtype=torch.bfloat16)
    right = _step(case, exact, x.float(), trains)()
    steps = {impl: _step(case, model, x, trains) for impl, model in models.items()}
    allowed = allowed_errors(steps["eager"](), right)
    for impl, step in steps.items():
        hold(f"{name}: {impl}", step(), right, allowed)
    return steps


class _Recorder(TorchDispatchMode):
    """Keeps the calls of products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            self.calls.append(call)
        return call()


def products(step: Callable[[], object]) -> Callable[[], None]:
    """The products and the attention of a step, with what it gave them."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # whose products are one call with the rest
    try:
        with _Recorder() as recorder, sdpa_kernel(_ATTENTION, set_priority=True):
            step()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)

    def again() -> None:
        for call in recorder.calls:
            call()

    return again


def _step(case: Case, model: Any, x: Tensor, trains: bool) -> Callable[[], list[Tensor]]:
    """The result, and in training the input's gradient; all parameters get theirs."""
    x = x.detach().requires_grad_(trains)
    rotation = _rotation(case, x)
    parameters = list(model.parameters())
    gradient: Tensor | None = None

    def step() -> list[Tensor]:
        nonlocal gradient
        if not trains:
            with torch.no_grad():
                return [_call(model, x, rotation)]
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        out = _call(model, x, rotation)
        if gradient is None:  # the same for all, as far as it can be rounded
            numbers = torch.arange(out.numel(), device=out.device)
            gradient = numbers.sin().view(out.shape).bfloat16().to(out.dtype)
        out.backward(gradient)
        assert x.grad is not None
        return [out.detach(), x.grad]

    return step


def _call(model: Any, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    if rotation is None:
        out = model(x)
    elif isinstance(getattr(model, "_orig_mod", model), TransformerBlock):
        out = model(x, cos=rotation[0], sin=rotation[1])
    else:
        out = model(x, position_embeddings=rotation)
    return out[0] if isinstance(out, tuple) else out


def _rotation(case: Case, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [1, tokens, head size], both halves alike."""
    if case.head_size == 0:
        return None
    exponents = -torch.arange(0, case.head_size, 2, device=x.device) / case.head_size
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), 500000.0**exponents)
    angles = angles.repeat(1, 2)[None]
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


if __name__ == "__main__":
    main("blocks", run, run_part, PARTS)
