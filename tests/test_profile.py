"""Names in profiles: the operators', which torch gives, and the plans'."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

import cudnn_ops
from cudnn_ops import profile_names
from cudnn_ops.plans import profile as profile_module


def test_torch_names_the_operators_with_their_shapes():
    query = torch.randn(1, 4, 16, 8, requires_grad=True)
    key = torch.randn(1, 2, 16, 8)
    with profile(record_shapes=True) as recorded, profile_names(shapes=True):
        out = cudnn_ops.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        out.sum().backward()
    shapes = {event.name: event.input_shapes for event in recorded.events()}
    assert shapes["cudnn_ops::sdpa"][:3] == [[1, 4, 16, 8], [1, 2, 16, 8], [1, 2, 16, 8]]
    assert shapes["cudnn_ops::_sdpa_backward"][:2] == [[1, 4, 16, 8], [1, 4, 16, 8]]
    assert not [name for name in shapes if name.startswith("cuDNN ")]  # no plan runs on a CPU


def test_contexts_overlap_and_end(monkeypatch):
    levels = []
    monkeypatch.setattr(profile_module._C, "set_profile_names", levels.append)
    with profile_names():
        with pytest.raises(KeyError), profile_names(shapes=True):
            raise KeyError
        with profile_names():
            pass
    outer, inner = profile_names(shapes=True), profile_names()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert levels == [1, 2, 1, 1, 1, 0, 2, 2, 1, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [False, True])
def test_a_plan_is_a_range_with_its_engine(shapes):
    x = torch.randn(1, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
    engine = cudnn_ops.support.explain("sdpa", x).engine
    torch.ops.cudnn_ops.sdpa(x, x, x)

    def plans(recorded: profile) -> list[str]:
        names = [event.name for event in recorded.events() if event.device_type.name == "CPU"]
        return [name for name in names if name.startswith("cuDNN ")]

    with profile() as recorded:
        torch.ops.cudnn_ops.sdpa(x, x, x)
    assert plans(recorded) == []
    with profile_names(shapes=shapes), profile() as recorded:
        torch.ops.cudnn_ops.sdpa(x, x, x)
    (name,) = plans(recorded)
    assert name.startswith(f"cuDNN {engine} of ")
    assert " bytes of workspace)" in name
    assert ("query=bf16[1, 4, 64, 64]" in name) == shapes
