"""The compile backend measures what a graph asks all at once, and gets what it got one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from cudnn_ops.compiler import choice, measuring
from cudnn_ops.compiler.choice import Chooser, Times
from cudnn_ops.compiler.measuring import Compiler, Question, Source, Spec
from cudnn_ops.compiler.options import settings_of
from cudnn_ops.compiler.patterns import PATTERNS
from cudnn_ops.compiler.report import CompileReport
from cudnn_ops.compiler.rewrite import rewrite
from cudnn_ops.compiler.rounds import rewrite_measured

EPS = 1e-6
FASTER, SLOWER = Times(1.0, 2.0), Times(2.0, 1.0)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(choice, "_in_memory", {})
    monkeypatch.setattr(choice, "_path", lambda: None)
    yield
    torch._dynamo.reset()


class Events(Chooser):
    """Compiles nothing, and has given times; notes what it does.

    Attributes:
        events: what, and in which round.
        times: of a question.
        results: of the rewritten graph.
    """

    def __init__(self, times: Callable[[Question], Times] = lambda _: FASTER) -> None:
        super().__init__(settings_of(None, None), CompileReport(), lambda _: {})
        self.events: list[str] = []
        self.times = times
        self._compiler = self  # type: ignore[assignment]

    def lower(self, question: Question) -> None:
        self.events.append("lower")

    def wait(self, question: Question) -> None:
        self.events.append("wait")

    def _timed(self, question: Question) -> Times:
        self.events.append("time")
        return self.times(question)


def _graph(function: Callable[..., Any], *inputs: Tensor, chooser: Chooser | None = None) -> Any:
    """Dynamo's, rewritten in rounds; without a chooser as it was."""
    graphs = []

    def backend(module: fx.GraphModule, _: list[Any]) -> Any:
        if chooser is not None:
            rewrite_measured(module, chooser)
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(result, function(*inputs))
    (graph,) = graphs
    return graph


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def _norms(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Three, of which two are alike."""
    ones = torch.ones(16, 16)
    return _norm(x @ ones, w), _norm(x[:2] @ ones, w), _norm(x @ ones @ ones, w)


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 16), torch.randn(16)


def test_all_are_compiled_before_one_is_timed():
    chooser = Events()
    _graph(_norms, *_inputs(), chooser=chooser)
    count = len(chooser.events) // 3
    assert count > 1
    assert chooser.events == ["lower"] * count + ["wait"] * count + ["time"] * count
    assert len(chooser.report.swapped) == 3


def test_what_is_known_is_asked_once():
    first, second = Events(), Events(lambda _: SLOWER)
    graphs = [_graph(_norms, *_inputs(), chooser=chooser) for chooser in (first, second)]
    assert not second.events
    assert graphs[0].code == graphs[1].code
    assert str(first.report) == str(second.report)


def _block(x: Tensor, w: Tensor) -> Tensor:
    """Attention and a norm of its sum, whose replacements have parts that the graph has, too."""
    q, k, v = F.linear(x, w).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 8, 16)
    return x + F.layer_norm(x, (16,)).relu()


def test_names_are_those_of_a_process_that_knows_the_times():
    """AOTAutograd's cache tells graphs apart by them: a second process would compile again."""
    codes = []
    for _ in range(2):
        chooser = Events()
        inputs = torch.randn(2, 8, 16), torch.randn(48, 16) / 8
        codes.append(_graph(_block, *inputs, chooser=chooser).code)
        assert {one.pattern for one in chooser.report.swapped} >= {"attention", "layer_norm"}
    assert not chooser.events  # which the first one had measured
    assert codes[0] == codes[1]


@pytest.mark.parametrize("kind", [FASTER, SLOWER], ids=["faster", "slower"])
def test_it_is_what_one_by_one_gives(kind, monkeypatch):
    in_rounds = Events(lambda _: kind)
    graph = _graph(_norms, *_inputs(), chooser=in_rounds)
    monkeypatch.setattr(choice, "_in_memory", {})
    one_by_one = Events(lambda _: kind)
    found = []

    def backend(module: fx.GraphModule, _: list[Any]) -> Any:
        rewrite(module, PATTERNS, one_by_one, one_by_one.report)
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(_norms, backend=backend, fullgraph=True)(*_inputs())
    assert found[0].code == graph.code
    assert str(in_rounds.report) == str(one_by_one.report)


def test_a_graph_with_nothing_faster_is_as_it_was():
    chooser = Events(lambda _: SLOWER)
    graph = _graph(_norms, *_inputs(), chooser=chooser)
    assert graph.code == _graph(_norms, *_inputs()).code
    assert {candidate.reason for candidate in chooser.report} == {"not faster here"}


def test_another_reading_is_asked_for_in_the_next_round():
    """A convolution of few channels, faster by squares of pixels or as it is."""

    def by_squares(question: Question) -> Times:
        return SLOWER if "[1, 1], [0, 0]" in question.graphs["ours"].code else FASTER

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=2)

    chooser = Events(by_squares)
    _graph(function, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), chooser=chooser)
    assert chooser.events == ["lower", "wait", "time"] * 2
    (candidate,) = chooser.report
    assert (candidate.swapped, candidate.note, candidate.ours_ms) == (True, "", 1.0)


def test_after_many_rounds_it_is_one_by_one(monkeypatch):
    monkeypatch.setattr("cudnn_ops.compiler.rounds._MOST_ROUNDS", 0)
    chooser = Events()
    _graph(_norms, *_inputs(), chooser=chooser)
    count = len(chooser.events) // 3
    assert count > 1
    assert chooser.events == ["lower", "wait", "time"] * count
    assert len(chooser.report.swapped) == 3


@pytest.mark.parametrize("step", ["lower", "wait", "_timed"])
def test_what_fails_costs_one_swap(step, monkeypatch):
    """Neither the others', nor tensors that its error would keep."""
    chooser = Events()
    done = getattr(chooser, step)

    def fails_for_two_rows(question: Question) -> Any:
        if any(spec is not None and spec.shape == (2, 16) for spec in question.inputs):
            raise RuntimeError("no memory")
        return done(question)

    monkeypatch.setattr(chooser, step, fails_for_two_rows)
    with pytest.warns(UserWarning, match="the pattern rms_norm failed.*no memory"):
        _graph(_norms, *_inputs(), chooser=chooser)
    reasons = [candidate.reason for candidate in chooser.report if not candidate.swapped]
    assert set(reasons) == {"the pattern failed: no memory"}
    assert len(chooser.report.swapped) == 2


def test_a_graph_within_the_graph():
    def function(x: Tensor, w: Tensor) -> Tensor:
        within = checkpoint(_norm, x, w, use_reentrant=False)
        return _norm(within[:4] @ x, w)

    chooser = Events()
    x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16)
    _graph(function, x, w, chooser=chooser)
    assert [candidate.swapped for candidate in chooser.report] == [True, True]
    assert chooser.events[:2] == ["lower"] * 2


def test_what_a_dry_run_would_ask_is_not_measured():
    chooser = Events()
    chooser.settings = settings_of(None, {"dry_run": True})
    _graph(_norms, *_inputs(), chooser=chooser)
    assert not chooser.events
    assert {candidate.reason for candidate in chooser.report} == {"dry run: not measured yet"}


# --- what is compiled --------------------------------------------------------------------


def _question(function: Callable[..., Any], *inputs: Tensor) -> Question:
    questions: dict[str, Question] = {}

    def backend(module: fx.GraphModule, _: list[Any]) -> Any:
        chooser = Events()
        with chooser.asking() as asked:
            rewrite(module, PATTERNS, chooser, chooser.report, lambda: False).undo("")
        questions.update(asked)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (question,) = questions.values()
    return question


def test_forward_and_backward_are_compiled_before_they_run():
    from torch._inductor import metrics

    x, w = (one.requires_grad_() for one in _inputs())
    question, compiler = _question(_norm, x, w), Compiler()
    compiler.lower(question)
    compiler.wait(question)
    made = metrics.generated_kernel_count
    with compiler.steps(question) as steps:
        grads = {name: step() for name, step in steps.items()}
    assert metrics.generated_kernel_count == made > 0
    assert list(grads) == ["ours", "stock"]
    for one in grads.values():
        assert [grad.shape for grad in one] == [(16,), (3, 16)] or [(3, 16), (16,)]


def test_gradients_have_the_memory_order_of_results():
    """Nothing copies those of heads, which a model's attention has transposed, too."""

    def heads(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x.view(3, 5, 2, 16), (16,), w, EPS).transpose(1, 2)

    x = torch.randn(3, 5, 32, requires_grad=True)
    question = _question(heads, x, torch.rand(16, requires_grad=True))
    with Compiler().steps(question) as steps:
        for step in steps.values():
            with torch.profiler.profile() as profile:
                step()
            names = {event.key for event in profile.key_averages()}
            assert names.isdisjoint({"aten::clone", "aten::contiguous"})


@pytest.mark.parametrize("make", [lambda x: x[:, :1].expand(-1, 4), lambda x: x[::2], torch.sum])
def test_gradients_of_any_results(make):
    """Those whose memory has less than elements, or more, are drawn as well."""
    x = torch.randn(6, 3, requires_grad=True)
    graph = fx.Graph()
    graph.output((graph.call_function(make, (graph.placeholder("input_0"),)),))
    compiled = measuring._Compiled(graph, [x])
    compiled.wait()
    assert [one.shape for one in compiled.step([x])()] == [x.shape]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_engines_are_measured_for_ours_without_gradients(trains, before, monkeypatch):
    """When its plans are made, at the first call; what the user has set is what it was."""
    seen = {}

    class Compiled:
        def __init__(self, graph: fx.Graph, inputs: object) -> None:
            self.name = "ours" if "cudnn_ops" in str(graph) else "stock"

        def wait(self) -> None:
            pass

        def step(self, inputs: object) -> Callable[[], object]:
            seen[self.name] = torch.backends.cudnn.benchmark
            return lambda: None

    monkeypatch.setattr(measuring, "_Compiled", Compiled)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    question = _question(_norm, *(one.requires_grad_(trains) for one in _inputs()))
    with Compiler().steps(question):
        assert torch.backends.cudnn.benchmark is before
    assert seen == {"ours": before or not trains, "stock": before}


def test_readings_of_one_place_share_what_is_stock(monkeypatch):
    """What is a follower in one is part of the match in the other."""
    made = []
    monkeypatch.setattr(measuring, "_Compiled", lambda graph, _: made.append(graph))

    def graph(*names: str) -> Source:
        graph = fx.Graph()
        value = graph.placeholder("input_0")
        for name, function in zip(names, (torch.relu, torch.tanh), strict=True):
            value = graph.call_function(function, (value,))
            value._rename(name)
        graph.output((value,))
        return Source(graph)

    spec = Spec(torch.float32, (2, 3), (3, 1), False, torch.device("cpu"))
    compiler = Compiler()
    for stock in (graph("value_0", "value_1"), graph("value_0", "follower_0")):
        ours = graph("mine", "yours")
        compiler.lower(Question("", {"ours": ours, "stock": stock}, (spec,), None))
    assert len(made) == 2  # ours and the stock graph, once each
    other = spec._replace(shape=(3, 2), strides=(2, 1))
    compiler.lower(Question("", {"ours": ours, "stock": stock}, (other,), None))
    assert len(made) == 4


def test_nobody_waits_for_kernels_before_all_are_lowered(monkeypatch):
    """Nor is anything that another thread compiles put off."""
    from torch._inductor.async_compile import AsyncCompile

    waited: list[str] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda _, scope: waited.append(scope["name"]))
    wait = AsyncCompile.wait
    with measuring._kernels_later() as waiting:
        AsyncCompile().wait({"name": "mine"})
        other = threading.Thread(target=AsyncCompile().wait, args=({"name": "another"},))
        other.start()
        other.join()
        assert waited == ["another"]
    assert AsyncCompile.wait is wait
    for one in waiting:
        one()
    assert waited == ["another", "mine"]


@pytest.mark.parametrize("is_starting", [True, False])
def test_kernels_go_to_a_pool_that_is_starting(is_starting, monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    not_ready = classmethod(lambda cls: False)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", not_ready)
    monkeypatch.setattr(AsyncCompile, "_ready_future", object() if is_starting else None)
    found: list[bool] = []
    with measuring._kernels_later():
        assert AsyncCompile.use_process_pool() is is_starting
        other = threading.Thread(target=lambda: found.append(AsyncCompile.use_process_pool()))
        other.start()
        other.join()
    assert found == [False]
    assert vars(AsyncCompile)["use_process_pool"] is not_ready


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, 4),
        torch.empty(4, 3).t(),
        torch.empty(3, 1).expand(3, 4),
        torch.empty(2, 3, 4)[:, :, ::2],
        torch.empty(0, 4),
        torch.empty(()),
        torch.zeros(2, 1, dtype=torch.int64).expand(2, 5),
        torch.zeros(2, 5, dtype=torch.bool),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{list(tensor.stride())}",
)
def test_a_tensor_of_a_trial_is_as_the_graph_has_it(tensor):
    shape, strides = tuple(tensor.shape), tensor.stride()
    spec = Spec(tensor.dtype, shape, strides, False, tensor.device)
    for one in (spec.drawn(), spec.empty()):
        assert (one.dtype, one.shape, one.stride()) == (tensor.dtype, shape, strides)
    drawn = spec.drawn()
    if not tensor.is_floating_point():
        assert bool((drawn == 1).all())
    elif drawn.numel() > 1:
        assert drawn.std() > 0
    assert Spec(torch.float32, (3,), (1,), True, tensor.device).drawn().requires_grad
