"""FP8 attention over packed sequences: results, mistakes, plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import cudnn_ops
from cudnn_ops.support import explain
from tests.cases import fp8 as cases
from tests.conftest import DEVICES
from tests.test_quantize import CHECKS

_op = torch.ops.cudnn_ops._varlen_fp8.default
E4M3, E5M2 = cases.FORMATS


@dataclass(frozen=True)
class Packed:
    """Sequences with so many queries and keys; ``gap`` unused tokens behind each."""

    lengths: tuple[int, ...]
    lengths_kv: tuple[int, ...] | None = None
    heads: int = 4
    heads_kv: int = 2
    size: int = 64
    value_size: int = 64
    gap: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.lengths}x{self.lengths_kv}-d{self.size}-gap{self.gap}-{self.options}"

    @property
    def of_keys(self) -> tuple[int, ...]:
        return self.lengths if self.lengths_kv is None else self.lengths_kv


def _packed(lengths, lengths_kv=None, **options: Any) -> Packed:
    return Packed(lengths, lengths_kv, options=options)


CASES = [
    _packed((100, 28, 300)),
    _packed((100, 28, 300), causal=True),
    _packed((1, 0, 64, 0), causal=True),
    _packed((33, 5, 0, 70), (40, 0, 9, 130)),
    _packed((33, 5, 7), (0, 0, 0)),
    _packed((33, 5, 70), (40, 9, 30), causal=True, bottom_right=False),
    _packed((33, 5, 70), (40, 9, 30), causal=True),
    _packed((60, 90), window_size=(16, 0)),
    Packed((33, 50), (70, 0), gap=3, options={"softmax_scale": 0.3}),
    Packed((65, 129), None, 8, 1, 128, 128, options={"causal": True}),
    Packed((65, 12), None, 4, 4, 192, 128, options={"causal": True}),
    Packed((130, 131), None, 3, 3, 16, 16),
]


def offsets(lengths: tuple[int, ...], gap: int, device: str) -> Tensor:
    tokens = torch.tensor([0, *(n + gap for n in lengths)], device=device)
    return tokens.cumsum(0).int()


def draw(case: Packed, device: str, dtype: torch.dtype = E4M3):
    """The operands of a call before and after they are rounded, and its keywords."""
    torch.manual_seed(len(case.lengths))
    starts = offsets(case.lengths, case.gap, device)
    starts_kv = starts if case.lengths_kv is None else offsets(case.of_keys, case.gap, device)
    total, total_kv = int(starts[-1]), int(starts_kv[-1])
    shapes = (
        (total, case.heads, case.size),
        (total_kv, case.heads_kv, case.size),
        (total_kv, case.heads_kv, case.value_size),
    )
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    data, descales = cases.inputs(tensors, dtype)
    keywords = {"cu_seqlens_q": starts, "cu_seqlens_k": starts_kv, **descales, **case.options}
    keywords |= {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.of_keys)}
    if case.gap:
        keywords["seqused_q"] = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        keywords["seqused_k"] = torch.tensor(case.of_keys, dtype=torch.int32, device=device)
    return tensors, data, keywords


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] < 10


@pytest.fixture
def computes(device: str) -> None:
    if device == "cuda" and is_hopper():
        pytest.skip("cuDNN's kernel for Hopper is refused: test_refused_on_hopper")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", cases.FORMATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, dtype, device, computes, poisoned):
    """Each sequence is what float64 makes of it alone, but for the rounding."""
    tensors, data, keywords = draw(case, device, dtype)
    found = cudnn_ops.varlen_attention_fp8(*data, **keywords)
    assert found.out.is_contiguous()
    assert found.out.dtype == torch.bfloat16
    descales = {name: keywords[name] for name in ("descale_q", "descale_k", "descale_v")}
    is_used = torch.zeros(found.out.shape[0], dtype=torch.bool)
    wanted = []
    starts, starts_kv = (keywords[f"cu_seqlens_{name}"].tolist() for name in ("q", "k"))
    for index, (length, length_kv) in enumerate(zip(case.lengths, case.of_keys, strict=True)):
        rows = slice(starts[index], starts[index] + length)
        columns = slice(starts_kv[index], starts_kv[index] + length_kv)

        def one(x: Tensor, part: slice) -> Tensor:
            return x[part].transpose(0, 1)[None]

        names = {"causal": "is_causal", "softmax_scale": "scale"}
        options = {names.get(name, name): value for name, value in case.options.items()}
        options.setdefault("bottom_right", True)
        dense = cases.Case(
            *(1, case.heads, case.heads_kv, length, length_kv, case.size, case.value_size),
            options=options,
        )
        parts = [one(x, part) for x, part in zip(tensors, (rows, columns, columns), strict=True)]
        own = tuple(one(x, part) for x, part in zip(data, (rows, columns, columns), strict=True))
        cases.check_error(dense, one(found.out, rows), parts, own, descales, torch.bfloat16)
        wide = [x.double() * d.double() for x, d in zip(own, descales.values(), strict=True)]
        wanted.append(cases.reference(dense, wide))
        is_used[rows] = True
        if length_kv == 0:
            assert not found.out[rows].any()
    assert not found.out[~is_used.to(device)].any()
    for name in ("amax_s", "amax_o"):
        most = max(getattr(reference, name).item() for reference in wanted)
        tolerance = {"rel": 0.1, "abs": 1e-3} if device == "cuda" else {"rel": 1e-4, "abs": 1e-7}
        if device == "cpu" or name == "amax_o":  # cuDNN's probabilities are of another maximum
            assert getattr(found, name).item() == pytest.approx(most, **tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, *cases.FORMATS], ids=str)
@pytest.mark.parametrize("scale_o", [None, 3.0])
def test_it_is_dense_attention_of_each(scale_o, out_dtype, device, computes):
    case = _packed((40, 40, 40), causal=True)
    _, data, keywords = draw(case, device)
    given = None if scale_o is None else torch.tensor([scale_o], device=device)
    found = cudnn_ops.varlen_attention_fp8(*data, **keywords, scale_o=given, out_dtype=out_dtype)
    descales = {name: value for name, value in keywords.items() if name.startswith("descale")}
    batched = (x.unflatten(0, (3, 40)).transpose(1, 2) for x in data)
    dense = cudnn_ops.sdpa_fp8(
        *batched, **descales, is_causal=True, scale_o=given, out_dtype=out_dtype
    )
    wanted = dense.transpose(1, 2).flatten(0, 1).float()
    close = {"rtol": 0.13, "atol": 2.0**-9} if out_dtype.itemsize == 1 or device == "cuda" else {}
    torch.testing.assert_close(found.out.float(), wanted, **close)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=str)
def test_nothing(lengths, device):
    starts = offsets(lengths, 0, device)
    q = torch.empty(0, 4, 64, device=device).to(E4M3)
    one = torch.ones(1, device=device)
    scales = dict.fromkeys(("descale_q", "descale_k", "descale_v"), one)
    found = cudnn_ops.varlen_attention_fp8(q, q, q, starts, starts, 0, 0, **scales)
    assert found.out.shape == (0, 4, 64)
    assert found.amax_s.item() == found.amax_o.item() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, computes):
    _, data, keywords = draw(CASES[3], device)
    torch.library.opcheck(_op, data, {**keywords, "out_dtype": torch.bfloat16}, test_utils=CHECKS)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device, computes):
    def attend(data, keywords):
        found = cudnn_ops.varlen_attention_fp8(*data, **keywords)
        return found.out * 2, found.amax_o

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for lengths in ((40, 3), (9, 77)):
        _, data, keywords = draw(_packed(lengths, causal=True), device)
        for one, other in zip(compiled(data, keywords), attend(data, keywords), strict=True):
            torch.testing.assert_close(one, other)


def test_vmap():
    _, (q, k, v), keywords = draw(CASES[1], "cpu")
    descales = torch.stack([keywords.pop("descale_q"), torch.ones(1)])

    def attend(descale):
        return tuple(cudnn_ops.varlen_attention_fp8(q, k, v, **keywords, descale_q=descale))

    found = torch.vmap(attend)(descales)
    for index, descale in enumerate(descales):
        for one, other in zip(found, attend(descale), strict=True):
            torch.testing.assert_close(one[index], other)


def test_decomposed():
    for case in CASES:
        if 0 not in case.of_keys:
            _, data, keywords = draw(case, "cpu")
            table = cudnn_ops.decompositions()
            found = table[_op](*data, **keywords, out_dtype=torch.float32)
            wanted = _op(*data, **keywords, out_dtype=torch.float32)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)


X = torch.ones(8, 2, 32).to(E4M3)
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a number as descale": ({"descale_q": 1.0}, TypeError, "descale_q must be a tensor, got 1.0"),
    "bfloat16": ({"q": torch.ones(8, 2, 32).bfloat16()}, TypeError, "q must be float8_e4m3fn or"),
    "two formats": ({"v": torch.ones(8, 2, 32).to(E5M2)}, TypeError, "cast them to one dtype"),
    "head size": (
        dict.fromkeys(("q", "k"), torch.ones(8, 2, 24).to(E4M3)),
        ValueError,
        "head size of q is 24; cuDNN supports multiples of 16",
    ),
    "dimensions": ({"k": torch.ones(1, 8, 2, 32).to(E4M3)}, ValueError, r"k must be \[tokens"),
    "two scales": ({"descale_v": torch.ones(2)}, ValueError, "descale_v must be one float32"),
    "scale": ({"scale_o": torch.ones(1).half()}, ValueError, "scale_o must be one float32"),
    "a negative scale": ({"softmax_scale": -1.0}, ValueError, "scale must be a normal, positive"),
    "output": ({"out_dtype": torch.int8}, TypeError, "out_dtype must be bfloat16"),
    "window": ({"window_size": 3}, TypeError, r"must be \(left, right\)"),
    "a list": ({"cu_seqlens_q": [0, 8]}, TypeError, "must be a tensor"),
    "the end": ({"cu_seqlens_q": torch.tensor([0, 7])}, ValueError, "cu_seqlens_q ends at 7"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    change, error, match = MISTAKES[name]
    starts = torch.tensor([0, 3, 8])
    scales = dict.fromkeys(("descale_q", "descale_k", "descale_v"), torch.ones(1))
    call = {"q": X, "k": X, "v": X, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    call |= {"max_seqlen_q": 5, "max_seqlen_k": 5, **scales, **change}
    with pytest.raises(error, match=match):
        cudnn_ops.varlen_attention_fp8(**call)


def test_there_is_no_derivative():
    starts, descale = torch.tensor([0, 8]), torch.ones(1, requires_grad=True)
    scales = {"descale_q": descale, "descale_k": descale.detach(), "descale_v": descale.detach()}
    found = cudnn_ops.varlen_attention_fp8(X, X, X, starts, starts, 8, 8, **scales)
    with pytest.raises(RuntimeError, match="varlen_attention_fp8 has no derivative"):
        found.out.sum().backward()


def plan(device: str, other_keys: bool = False, size: int = 64, **options: Any):
    query, key = (torch.empty(300, h, size, dtype=E4M3, device="meta") for h in (4, 2))
    starts, others = (torch.empty(4, dtype=torch.int32, device="meta") for _ in range(2))
    starts_kv = others if other_keys else starts
    return explain(
        *("varlen_attention_fp8", query, key),
        **{"cu_seqlens_q": starts, "cu_seqlens_k": starts_kv, "device": device, **options},
    )


def test_plans():
    for options in (
        {},
        {"causal": True},
        {"causal": True, "other_keys": True},
        {"window_size": (16, 0)},
        {"window_size": (16, 0), "other_keys": True},
    ):
        for size in (16, 80, 128):
            answer = plan("b200", size=size, **options)
            assert answer.supported, (options, size, answer.reason)
    assert not plan("b200", size=192).supported
    assert not plan("a100").supported


def test_what_is_wrong_on_hopper_has_its_row():
    for options in ({}, {"causal": True}, {"window_size": (16, 0)}):
        assert "illegal instruction" in plan("h200", **options).reason


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_one_plan_for_many(device):
    made = set()
    for tokens, sequences, most in ((300, 3, 200), (999, 3, 1000), (700, 4, 30)):
        q = torch.empty(tokens, 4, 64, dtype=E4M3, device="meta")
        requests = cudnn_ops.plan_requests(
            "varlen_attention_fp8", q, cu_seqlens_q=sequences, max_seqlen_q=most, device=device
        )
        made |= {str(request) for request in requests}
    assert len(made) == 2  # of 3 sequences and of 4


@pytest.mark.gpu
def test_refused_on_hopper():
    """Before it reaches the GPU: the process lives."""
    if not is_hopper():
        pytest.skip("Blackwell's kernels compute these")
    for case in CASES:
        _, data, keywords = draw(case, "cuda")
        if 0 not in (data[0].shape[0], data[1].shape[0]):
            with pytest.raises(NotImplementedError, match="varlen_attention_fp8"):
                cudnn_ops.varlen_attention_fp8(*data, **keywords)
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_replayed(device, computes):
    _, data, keywords = draw(CASES[3], "cuda")
    cudnn_ops.varlen_attention_fp8(*data, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cudnn_ops.varlen_attention_fp8(*data, **keywords)
    keywords["descale_v"].mul_(2)
    graph.replay()
    for one, other in zip(captured, cudnn_ops.varlen_attention_fp8(*data, **keywords), strict=True):
        torch.testing.assert_close(one, other)
