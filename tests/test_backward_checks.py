"""Backward operators can be called with anything: what does not fit is refused, not read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
Arguments = dict[str, object]


def norm(device: str, is_layer: bool) -> Arguments:
    x = torch.ones(2, 3, 64, device=device)
    stats = torch.ones(6, device=device)
    return {
        "grad_out": x,
        "grad_sum": x,
        "input": x,
        "normalized_shape": [64],
        "weight": torch.ones(64, device=device),
        "mean": stats if is_layer else stats[:0],
        "rstd": stats,
        "is_layer": is_layer,
        "zero_centered": False,
        "output_mask": [True, True, is_layer],
    }


def group_norm(device: str) -> Arguments:
    x, channels = torch.ones(2, 12, 5, device=device), torch.ones(12, device=device)
    stats = torch.ones(2, 3, device=device)
    return {
        "grad_out": x,
        "grad_sum": x,
        "input": x,
        "num_groups": 3,
        "weight": channels,
        "bias": channels,
        "mean": stats,
        "rstd": stats,
        "activation": 2,
        "output_mask": [True, True, True],
    }


def batch_norm(device: str) -> Arguments:
    x, channels = torch.ones(2, 12, 5, device=device), torch.ones(12, device=device)
    return {
        "grad_out": x,
        "input": x,
        "weight": channels,
        "bias": channels,
        "out": x,
        "mean": channels,
        "rstd": channels,
        "training": True,
        "activation": 1,
        "output_mask": [True] * 4,
        "params_in_input_dtype": False,
        "grad_more": x,
    }


def max_pool(device: str) -> Arguments:
    x = torch.ones(2, 12, 5, 4, device=device)
    return {
        "grad_out": x,
        "offsets": torch.zeros(2, 12, 5, 4, dtype=torch.uint8, device=device),
        "grad_more": x,
        "size": [9, 8],
        "kernel_size": [3, 3],
        "stride": [2, 2],
        "padding": [1, 1],
        "dilation": [1, 1],
    }


def adaptive_norm(device: str) -> Arguments:
    x, columns = torch.ones(2, 5, 24, device=device), torch.ones(24, device=device)
    modulation, stats = torch.ones(2, 24, device=device), torch.ones(2, 5, device=device)
    return {
        "grad_out": x,
        "grad_sum": x,
        "input": x,
        "update": x,
        **dict.fromkeys(("gate", "scale", "shift"), modulation),
        "weight": columns,
        "bias": columns,
        "mean": stats,
        "rstd": stats,
        "is_layer": True,
        "output_mask": [True] * 7,
    }


def gated(device: str, activation: int) -> Arguments:
    x = torch.ones(3, 64, device=device)
    return {"grad_out": x, "gate": x, "up": x, "activation": activation}


def rotary(device: str) -> Arguments:
    x, angle = torch.ones(2, 3, 5, 8, device=device), torch.ones(2, 5, 8, device=device)
    options: Arguments = {"key": None, "positions": None, "layout": [0, 0], "is_backward": True}
    return {"input": x, "cos": angle, "sin": angle, **options}


def conv(device: str) -> Arguments:
    image = torch.ones(2, 8, 6, 6, device=device)
    image = image.contiguous(memory_format=torch.channels_last)
    return {
        "grad_out": image[:, :4, 1:5, 1:5],
        "input": image,
        "weight": torch.ones(4, 8, 3, 3, device=device),
        "saved": image[:, :4, 1:5, 1:5],
        "geometry": [1, 1, 0, 0, 0, 0, 1, 1, 1],
        "activation": 1,
        "output_mask": [True, True, True, False],
    }


def linear(device: str) -> Arguments:
    x, out = torch.ones(3, 8, device=device), torch.ones(3, 4, device=device)
    return {
        "grad_out": out,
        "input": x,
        "weight": torch.ones(4, 8, device=device),
        "saved": out,
        "activation": 1,
        "output_mask": [True, True, True],
    }


def mlp(device: str) -> Arguments:
    x, hidden = torch.ones(3, 8, device=device), torch.ones(3, 4, device=device)
    return {
        "grad_out": torch.ones(3, 6, device=device),
        "input": x,
        "weight1": torch.ones(4, 8, device=device),
        "weight2": torch.ones(6, 4, device=device),
        "hidden": hidden,
        "before": hidden,
        "activation": 2,
        "gated": False,
        "output_mask": [True] * 5,
    }


def moe_combine(device: str) -> Arguments:
    return {
        "grad_out": torch.ones(3, 8, device=device),
        "rows": torch.ones(6, 8, device=device),
        "positions": torch.zeros(3, 2, dtype=torch.int32, device=device),
        "weights": torch.ones(3, 2, device=device),
        "output_mask": [True, True],
    }


def grouped_linear(device: str) -> Arguments:
    return {
        "grad_out": torch.ones(5, 4, device=device),
        "input": torch.ones(5, 8, device=device),
        "weight": torch.ones(2, 4, 8, device=device),
        "offsets": torch.full((2,), 5, dtype=torch.int32, device=device),
        "output_mask": [True, True],
    }


CALLS: dict[str, tuple[str, Callable[[str], Arguments]]] = {
    "rms_norm": ("_norm_backward", lambda device: norm(device, False)),
    "layer_norm": ("_norm_backward", lambda device: norm(device, True)),
    "group_norm": ("_group_norm_backward", group_norm),
    "batch_norm": ("_batch_norm_backward", batch_norm),
    "max_pool2d": ("_max_pool2d_backward", max_pool),
    "gate_add_adaptive_layer_norm": ("_adaptive_norm_backward", adaptive_norm),
    "swiglu": ("_gated_backward", lambda device: gated(device, 0)),
    "geglu": ("_gated_backward", lambda device: gated(device, 2)),
    "rotary_embedding": ("_rotary", rotary),
    "conv": ("_conv_backward", conv),
    "linear": ("_linear_backward", linear),
    "mlp": ("_mlp_backward", mlp),
    "moe_combine": ("_moe_combine_backward", moe_combine),
    "grouped_linear": ("_grouped_linear_backward", grouped_linear),
}


def half(tensor: Tensor) -> Tensor:
    return tensor.half()


def narrow(tensor: Tensor) -> Tensor:
    return tensor[..., :-1]


def short(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def eight_bits(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float8_e4m3fn)


def repeated(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor)


#: Operator, argument, what is done to it, and what is raised.
MISTAKES = [
    *[
        (op, name, change, error, rf"{op} backward: {name} must be")
        for op in ("rms_norm", "layer_norm")
        for name in ("grad_out", "grad_sum")
        for change, error in ((narrow, ValueError), (short, ValueError), (half, TypeError))
    ],
    ("rms_norm", "input", narrow, ValueError, "input must end with normalized_shape"),
    ("rms_norm", "input", eight_bits, TypeError, "input must be float16"),
    ("rms_norm", "weight", narrow, ValueError, "weight must be of normalized_shape"),
    ("rms_norm", "weight", half, TypeError, "weight must be of the input's dtype"),
    ("rms_norm", "rstd", short, ValueError, r"rms_norm backward: rstd must be .*\[6\]"),
    ("rms_norm", "rstd", half, ValueError, "rms_norm backward: rstd must be"),
    ("rms_norm", "output_mask", lambda _: [True] * 3, ValueError, "the gradient of a bias"),
    ("layer_norm", "mean", short, ValueError, r"layer_norm backward: mean must be .*\[6\]"),
    ("layer_norm", "mean", lambda stats: stats.double(), ValueError, "mean must be"),
    ("layer_norm", "mean", lambda stats: stats[:1].expand(6), ValueError, "mean must be"),
    ("layer_norm", "normalized_shape", lambda _: [3, 64], ValueError, "weight must be"),
    *[
        ("group_norm", name, change, error, f"group_norm backward: {name} must be")
        for name in ("grad_out", "grad_sum")
        for change, error in ((narrow, ValueError), (short, ValueError), (half, TypeError))
    ],
    *[
        ("group_norm", name, change, ValueError, rf"backward: {name} must be .*\[2, 3\]")
        for name in ("mean", "rstd")
        for change in (narrow, short, half, repeated)
    ],
    ("group_norm", "num_groups", lambda _: 5, ValueError, "num_groups must divide"),
    ("group_norm", "activation", lambda _: 1, ValueError, "activation must be 0 or 2, got 1"),
    ("group_norm", "weight", lambda _: None, ValueError, "the gradient of a weight or bias"),
    ("group_norm", "bias", lambda _: None, ValueError, "the gradient of a weight or bias"),
    *[
        ("batch_norm", name, change, error, f"batch_norm backward: {name} must be")
        for name in ("grad_out", "grad_more", "out")
        for change, error in ((narrow, ValueError), (short, ValueError), (half, TypeError))
    ],
    *[
        ("batch_norm", name, change, ValueError, rf"backward: {name} must be .*\[12\]")
        for name in ("mean", "rstd")
        for change in (short, half, repeated)
    ],
    ("batch_norm", "activation", lambda _: 2, ValueError, "activation must be 0 or 1, got 2"),
    ("batch_norm", "activation", lambda _: 0, ValueError, "out must be given with ReLU alone"),
    ("batch_norm", "weight", short, ValueError, r"weight must be \[12\]"),
    ("batch_norm", "bias", short, ValueError, r"bias must be \[12\]"),
    *[
        ("max_pool2d", name, change, error, f"max_pool2d backward: {name} must be")
        for name in ("offsets", "grad_more")
        for change, error in ((narrow, ValueError), (short, ValueError), (half, TypeError))
    ],
    ("max_pool2d", "grad_out", narrow, ValueError, "backward: grad_out must be of the output's"),
    ("max_pool2d", "grad_out", short, ValueError, "backward: offsets must be"),
    ("max_pool2d", "grad_out", half, TypeError, "backward: grad_more must be"),
    ("max_pool2d", "grad_out", eight_bits, TypeError, "backward: grad_out must be float16"),
    ("max_pool2d", "grad_out", lambda x: x[0], ValueError, "backward: grad_out must be of"),
    ("max_pool2d", "size", lambda _: [9], ValueError, "size must be the input's H and W"),
    ("max_pool2d", "size", lambda _: [11, 8], ValueError, "backward: grad_out must be of"),
    ("max_pool2d", "stride", lambda _: [0, 1], ValueError, "stride must be positive"),
    ("max_pool2d", "kernel_size", lambda _: [16, 16], NotImplementedError, "at most 255 numbers"),
    *[
        ("gate_add_adaptive_layer_norm", name, change, error, f"norm backward: {name} must be")
        for name in ("grad_out", "grad_sum")
        for change, error in ((narrow, ValueError), (short, ValueError), (half, TypeError))
    ],
    *[
        ("gate_add_adaptive_layer_norm", name, change, ValueError, rf"{name} must be .*\[2, 5\]")
        for name in ("mean", "rstd")
        for change in (narrow, half, repeated)
    ],
    *[
        ("gate_add_adaptive_layer_norm", name, change, error, f"norm: {name} must be")
        for name in ("gate", "scale", "shift")
        for change, error in ((narrow, ValueError), (half, TypeError))
    ],
    *[
        ("gate_add_adaptive_layer_norm", name, lambda _: None, ValueError, "that is not there")
        for name in ("scale", "shift", "weight", "bias")
    ],
    ("gate_add_adaptive_layer_norm", "gate", lambda _: None, ValueError, "update and gate go"),
    ("gate_add_adaptive_layer_norm", "is_layer", lambda _: False, ValueError, "no bias"),
    *[
        (op, name, change, error, rf"{op}.*: .*{name}")
        for op in ("swiglu", "geglu")
        for name in ("grad_out", "gate", "up")
        for change, error in ((narrow, ValueError), (short, ValueError), (half, TypeError))
    ],
    ("swiglu", "activation", lambda _: 3, ValueError, "activation must be 0, 1 or 2, got 3"),
    ("swiglu", "activation", lambda _: -1, ValueError, "activation must be 0, 1 or 2, got -1"),
    ("rotary_embedding", "input", narrow, ValueError, "input must be"),
    ("rotary_embedding", "input", eight_bits, TypeError, "input must be float16"),
    ("rotary_embedding", "input", half, None, ""),  # with angles of float32
    ("rotary_embedding", "cos", narrow, ValueError, "cos and sin must be"),
    ("rotary_embedding", "sin", short, ValueError, "cos and sin must be"),
    ("rotary_embedding", "sin", half, TypeError, "cos and sin must be"),
    ("conv", "grad_out", narrow, ValueError, "backward: grad_out must be like the output"),
    ("conv", "grad_out", half, ValueError, "backward: grad_out must be like the output"),
    ("conv", "saved", short, ValueError, "backward: saved must be like the output"),
    ("conv", "saved", lambda _: None, ValueError, "an activation needs saved"),
    ("conv", "weight", half, TypeError, "input and weight must be of one dtype"),
    *[
        (op, name, change, error, f"{op} backward: {name} must be")
        for op, names in (("linear", ("grad_out", "saved")), ("mlp", ("grad_out", "hidden")))
        for name in names
        for change, error in ((narrow, ValueError), (short, ValueError), (half, TypeError))
    ],
    ("linear", "saved", lambda _: None, ValueError, "an activation needs saved"),
    ("linear", "weight", half, TypeError, "input and weight must be of one dtype"),
    ("linear", "weight", narrow, ValueError, "does not fit 8 columns"),
    ("mlp", "before", short, ValueError, "mlp backward: before must be"),
    ("mlp", "before", lambda _: None, ValueError, "an activation needs before"),
    ("mlp", "weight2", narrow, ValueError, r"w2 must be \[out, 4\]"),
    ("mlp", "gated", lambda _: True, ValueError, "w2 must be"),
    ("moe_combine", "grad_out", short, ValueError, "grad_out must have a row for each of the 3"),
    ("moe_combine", "grad_out", narrow, ValueError, r"backward: rows must be \[6, 7\]"),
    ("moe_combine", "grad_out", half, TypeError, "backward: rows must be Half"),
    ("moe_combine", "grad_out", eight_bits, TypeError, "grad_out must be float16"),
    ("moe_combine", "rows", short, ValueError, r"backward: rows must be \[6, 8\]"),
    ("moe_combine", "rows", lambda _: None, ValueError, "needs weights and rows"),
    ("moe_combine", "weights", lambda _: None, ValueError, "needs weights and rows"),
    ("moe_combine", "weights", narrow, ValueError, r"weights must be \[3, 2\]"),
    ("moe_combine", "weights", half, TypeError, "weights must be Float"),
    ("moe_combine", "positions", lambda places: places.long(), ValueError, "must be the int32"),
    *[
        ("grouped_linear", "grad_out", change, error, "grouped_linear backward: grad_out must be")
        for change, error in ((narrow, ValueError), (short, ValueError), (half, TypeError))
    ],
    ("grouped_linear", "input", short, ValueError, "grad_out must be|must rise"),
    ("grouped_linear", "input", half, TypeError, "weight must be Half"),
    ("grouped_linear", "weight", narrow, ValueError, "weight must be"),
    ("grouped_linear", "weight", short, ValueError, "offsets must be an int32"),
    ("grouped_linear", "offsets", lambda ends: ends.long(), ValueError, "offsets must be an int32"),
    ("conv", "geometry", lambda numbers: numbers[:-1], ValueError, "do not fit"),
]


def check(mistake: int, device: str, where: AbstractContextManager[object]) -> None:
    op, name, change, error, match = MISTAKES[mistake]
    backward, make = CALLS[op]
    with where:
        arguments = make(device)
        call = getattr(_ops, backward)
        wrong = {**arguments, name: change(arguments[name])}
        if error is None:
            call(**wrong)
        else:
            with pytest.raises(error, match=match):
                call(**wrong)
        call(**arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_real(mistake, device):
    check(mistake, device, nullcontext())


# A torch without CUDA cannot make views of fake CUDA tensors.
@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.version.cuda else ["cpu"])
@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_fake(mistake, device):
    check(mistake, device, FakeTensorMode())


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *[("layer_norm", name) for name in ("grad_out", "grad_sum", "weight", "mean", "rstd")],
        *[("group_norm", name) for name in ("grad_out", "grad_sum", "weight", "mean", "rstd")],
        *[("batch_norm", name) for name in ("grad_out", "grad_more", "out", "weight", "mean")],
        *[("max_pool2d", name) for name in ("grad_out", "offsets", "grad_more")],
        *[("gate_add_adaptive_layer_norm", name) for name in ("grad_out", "gate", "bias", "rstd")],
        *[("swiglu", name) for name in ("grad_out", "up")],
        *[("rotary_embedding", name) for name in ("cos", "sin")],
        *[("moe_combine", name) for name in ("rows", "positions", "weights")],
        *[("grouped_linear", name) for name in ("grad_out", "weight", "offsets")],
        # Of views.
        *[("conv", name) for name in ("grad_out", "weight", "saved") if torch.version.cuda],
    ],
)
def test_another_device(op, name):
    backward, make = CALLS[op]
    with FakeTensorMode():
        arguments = {**make("cuda"), name: make("cpu")[name]}
        with pytest.raises(ValueError, match=f"(?s)cudnn_ops.*{name}.*(cpu|cuda)"):
            getattr(_ops, backward)(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "name"), [("layer_norm", "rstd"), ("swiglu", "grad_out"), ("conv", "saved")]
)
def test_one_tensor_left_on_the_cpu(op, name):
    backward, make = CALLS[op]
    arguments = {**make("cuda"), name: make("cpu")[name]}
    with pytest.raises(ValueError, match=name):
        getattr(_ops, backward)(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op",
    [
        *("rms_norm", "group_norm", "batch_norm", "gate_add_adaptive_layer_norm", "swiglu"),
        *("rotary_embedding", "moe_combine", "grouped_linear", "max_pool2d"),
    ],
)
def test_float64_is_for_cpus(op):
    backward, make = CALLS[op]
    arguments = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in make("cuda").items()
    }
    with pytest.raises(TypeError, match="float16, bfloat16 or float32"):
        getattr(_ops, backward)(**arguments)
