"""Graphs that an earlier process has compiled: they are neither matched nor rewritten again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import cudnn_ops
from cudnn_ops.compiler import backend, choice, known_graphs
from cudnn_ops.compiler.choice import Times
from cudnn_ops.compiler.fingerprint import fingerprint
from cudnn_ops.compiler.known_graphs import KnownGraph
from cudnn_ops.compiler.patterns.rms_norm import RmsNorm
from cudnn_ops.compiler.report import Candidate
from tests.cases.compiler import Rewritten
from tests.conftest import DEVICES


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """Empty ones, of ours and of inductor."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(choice, "_in_memory", {})
    cudnn_ops.set_store(tmp_path / "store")
    cudnn_ops.compile_report().clear()
    torch._dynamo.reset()
    yield tmp_path / "store"
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    cudnn_ops.set_store(None)


class Norms(nn.Module):
    """Two layers that are alike, for channels of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + F.rms_norm(x, (64,), weight, 1e-5)
        return x


def options_on(device: str) -> dict[str, Any]:
    """On a GPU, what was measured decides."""
    return {"swap": ["rms_norm"]} if device == "cpu" else {}


def compiled_again(model: nn.Module, x: Tensor, **options: Any) -> tuple[list[Tensor], list[Any]]:
    """As in a process of its own: the result with its gradients, and the report's candidates."""
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    counters.clear()
    model.zero_grad()
    result = torch.compile(model, backend="cudnn_ops", options=options)(x)
    gradients = []
    if result.requires_grad:
        result.square().sum().backward()
        gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return [result.detach(), *gradients], list(cudnn_ops.compile_report())


def _never(*_: object) -> None:
    raise AssertionError("the graph was rewritten")


def kept_in(folder: Path) -> list[Path]:
    return list(folder.glob("compiled_*.json"))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_what_was_rewritten_once_is_not_again(device, gradients, store, monkeypatch):
    model, x = Norms().to(device).requires_grad_(gradients), torch.randn(5, 64, device=device)
    options = options_on(device)
    first, found = compiled_again(model, x, **options)
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1
    (path,) = kept_in(store)
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(backend, "rewrite_measured", _never)
    again, known = compiled_again(model, x, **options)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert known == found
    assert {one.pattern for one in found} >= {"rms_norm"}
    assert cudnn_ops.compile_report().graphs == 1
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    expected = model(x)
    torch.testing.assert_close(again[0], expected.detach())
    if gradients:
        model.zero_grad()
        expected.square().sum().backward()
        for parameter, gradient in zip(model.parameters(), again[1:], strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def normed(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, 1e-5)


def _filled(x: Tensor, w: Tensor) -> Tensor:
    out = normed(x, w)
    x.mul_(2)
    return out + x


def _rounded(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return normed(x, w) @ w.outer(w)


#: What a graph does besides a norm, and what it is of.
BESIDES: dict[str, tuple[Callable[..., Any], tuple[Tensor, Tensor]]] = {
    "input changed in place": (_filled, (torch.randn(3, 64), torch.rand(64))),
    "view of an input": (lambda x, w: (normed(x, w), x[1:]), (torch.randn(3, 64), torch.rand(64))),
    "result twice": (lambda x, w: ((y := normed(x, w)), y), (torch.randn(3, 64), torch.rand(64))),
    "view of a result": (lambda x, w: (y := normed(x, w), y.T), (torch.randn(3, 8), torch.rand(8))),
    "autocast": (_rounded, (torch.randn(3, 64), torch.rand(64))),
    "no rows": (normed, (torch.randn(0, 64), torch.rand(64))),
    "one channel": (normed, (torch.randn(5, 1), torch.rand(1))),
    "unaligned": (normed, (torch.randn(193)[1:].view(3, 64), torch.rand(64))),
    "of one memory": (normed, (torch.rand(64).expand(3, 64), torch.rand(64))),
    "double": (normed, (torch.randn(3, 7).double(), torch.rand(7).double())),
    "half": (normed, (torch.randn(3, 7).half(), torch.rand(7).half())),
    "equal rows": (normed, (torch.full((3, 64), 120.0), torch.rand(64))),
}


@pytest.mark.parametrize("name", BESIDES)
def test_what_is_found_computes_the_same(name, store, monkeypatch):
    function, (x, w) = BESIDES[name]
    seen: list[Any] = []
    for is_known in (False, True):
        if is_known:
            assert len(kept_in(store)) == 1
            monkeypatch.setattr(backend, "rewrite_measured", _never)
        torch._dynamo.reset()
        # Whoever runs it: an input that is changed is a copy.
        given = x.clone() if name == "input changed in place" else x
        compiled = torch.compile(function, backend="cudnn_ops", options={"swap": ["rms_norm"]})
        seen.append([compiled(given, w), given])
    given = x.clone() if name == "input changed in place" else x
    expected = [function(given, w), given]
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)
    tolerance = 2e-2 if name == "autocast" else 2e-3 if name == "half" else 1e-5
    torch.testing.assert_close(seen[1], expected, rtol=tolerance, atol=tolerance)


def test_a_view_of_an_input_is_one(store):
    x, w = torch.randn(3, 64), torch.rand(64)
    for _ in range(2):
        torch._dynamo.reset()
        function = torch.compile(
            lambda x, w: (normed(x, w), x[1:]), backend="cudnn_ops", options={"swap": ["rms_norm"]}
        )
        assert function(x, w)[1].data_ptr() == x[1:].data_ptr()


def test_of_a_graph_without_swaps_inductor_s_is_known(store, monkeypatch):
    model, x = Norms(), torch.randn(5, 64)
    _, found = compiled_again(model, x)
    assert {one.reason for one in found} == {"its tensors are not on a GPU"}
    monkeypatch.setattr(backend, "rewrite_measured", _never)
    again, known = compiled_again(model, x)
    assert known == found
    torch.testing.assert_close(again[0], model(x).detach())


def test_what_inductor_has_lost_is_rewritten(store, monkeypatch, tmp_path):
    model, x = Norms(), torch.randn(5, 64)
    first, found = compiled_again(model, x, swap=["rms_norm"])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "another"))
    again, known = compiled_again(model, x, swap=["rms_norm"])
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0
    assert known == found
    assert cudnn_ops.compile_report().graphs == 1
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_went_wrong_is_tried_again(store, monkeypatch):
    """So that later processes warn of it, too."""
    monkeypatch.setattr(RmsNorm, "find", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.warns(UserWarning, match="the pattern .* failed"):
            compiled_again(Norms(), torch.randn(5, 64), swap=["rms_norm"])
    assert not kept_in(store)


def test_a_dry_run_is_not_kept(store):
    compiled_again(Norms(), torch.randn(5, 64), dry_run=True)
    assert not kept_in(store)


@pytest.mark.parametrize("content", ["{", "[]", "1", '["word", 1, []]', '["word", {}, [{}]]'])
def test_a_damaged_file_is_written_again(content, store):
    model, x = Norms(), torch.randn(5, 64)
    _, found = compiled_again(model, x, swap=["rms_norm"])
    (path,) = kept_in(store)
    whole = path.read_text()
    path.write_text(content)
    again, known = compiled_again(model, x, swap=["rms_norm"])
    assert known == found
    assert path.read_text() == whole
    torch.testing.assert_close(again[0], model(x).detach())


def test_other_times_decide_again(store):
    times = {"first": Times(1.0, 2.0), "second": Times(0.1, 0.3, 1e-3, 2e-3)}
    candidate = Candidate("rms_norm", "add", (2, 3), "float32", swapped=True, ours_ms=1.0)
    known = KnownGraph("word", times, [candidate])
    store.mkdir()
    known_graphs.keep("print", known)
    assert known_graphs.find("print", (times | {"third": Times(1.0, 1.0)}).get) == known
    assert known_graphs.find("print", (times | {"second": Times(0.1, 0.4, 1e-3, 2e-3)}).get) is None
    assert known_graphs.find("print", ({"first": times["first"]}).get) is None
    assert known_graphs.find("another", times.get) is None
    cudnn_ops.set_store(None)
    assert known_graphs.find("print", times.get) is None


def test_lines_are_those_of_the_model_as_it_is():
    graph = fx.Graph()
    node = graph.placeholder("add")
    node.meta["stack_trace"] = '  File "/some/model.py", line 7, in forward\n    x + y'
    candidates = [
        Candidate("linear", "add", where="model.py:5"),
        Candidate("linear", "of_ours", where="model.py:6"),
    ]
    known = KnownGraph("", {}, candidates)
    assert [one.where for one in known.candidates_in(graph)] == ["model.py:7", "model.py:6"]


def captured(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    """What Dynamo makes of it."""
    unchanged = Rewritten(function, swap=[], dynamic=dynamic)
    unchanged(*inputs)
    return unchanged.graphs[0]


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).relu() + 1.0


def x_y(**kwargs: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 6, **kwargs), torch.zeros(4, 6)


_SAME = torch.zeros(4, 6)
#: What differs from `product` of two tensors of 4 x 6.
OTHERS: dict[str, tuple[Callable[..., Any], tuple[Tensor, Tensor]]] = {
    "constant": (lambda x, y: (x * y).relu() + 2.0, x_y()),
    "kind of constant": (lambda x, y: (x * y).relu() + 1, x_y()),
    "operation": (lambda x, y: (x * y).sigmoid() + 1.0, x_y()),
    "order": (lambda x, y: (y * y).relu() + 1.0, x_y()),
    "results": (lambda x, y: ((p := x * y).relu() + 1.0, p), x_y()),
    "size": (product, (torch.zeros(5, 6), torch.zeros(5, 6))),
    "strides": (product, (torch.zeros(6, 4).T, torch.zeros(4, 6))),
    "dtype": (product, x_y(dtype=torch.float64)),
    "gradient": (product, x_y(requires_grad=True)),
    "parameter": (product, (nn.Parameter(torch.zeros(4, 6)), torch.zeros(4, 6))),
    "memory": (product, (_SAME, _SAME[:])),
    "offset": (product, (torch.zeros(30)[6:].view(4, 6), torch.zeros(4, 6))),
}


def test_graphs_that_differ_have_other_fingerprints():
    prints = {"none": fingerprint(captured(product, *x_y()))}
    prints |= {name: fingerprint(captured(*function)) for name, function in _each_other()}
    prints["settings"] = fingerprint(captured(product, *x_y()), ["linear"])
    with torch.no_grad():
        prints["grad mode"] = fingerprint(captured(product, *x_y()))
    assert None not in prints.values()
    assert len(set(prints.values())) == len(prints), prints
    assert fingerprint(captured(product, *x_y())) == prints["none"]


def _each_other() -> list[tuple[str, tuple[Any, ...]]]:
    return [(name, (function, *inputs)) for name, (function, inputs) in OTHERS.items()]


@torch.library.custom_op("tests_known_graphs::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch._dynamo.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    return x + 1


def _checkpointed(x: Tensor) -> Tensor:
    return checkpoint(torch.sin, x, use_reentrant=False)


#: What nodes do not say all of.
UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "graph within": _checkpointed,
    "operator of others": lambda x: torch.ops.tests_known_graphs.twice(x),
    "function of others": lambda x: opaque(x) * 2,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_graph_of_which_nodes_do_not_say_all_has_no_fingerprint(name):
    assert fingerprint(captured(UNKNOWN[name], torch.zeros(4, requires_grad=True))) is None


def test_a_graph_with_symbols_has_no_fingerprint():
    assert fingerprint(captured(product, *x_y(), dynamic=True)) is None


def test_without_inductor_s_caches_nothing_is_kept(store):
    model, x = Norms(), torch.randn(5, 64)
    for _ in range(2):
        with torch._functorch.config.patch(enable_autograd_cache=False):
            result, found = compiled_again(model, x, swap=["rms_norm"])
        assert [one.swapped for one in found] == [True, True]
        torch.testing.assert_close(result[0], model(x).detach())
    assert not kept_in(store)


def test_a_graph_that_does_not_compile_with_our_operators_is_not_kept(store, monkeypatch):
    monkeypatch.setattr(backend, "at_hand", lambda *_: 1 / 0)
    model, x = Norms(), torch.randn(5, 64)
    with pytest.warns(UserWarning, match="does not compile with our operators"):
        result, found = compiled_again(model, x, swap=["rms_norm"])
    assert not kept_in(store)
    assert not any(one.swapped for one in found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(result[0], model(x).detach())
