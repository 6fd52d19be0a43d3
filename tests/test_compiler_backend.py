"""torch.compile(model, backend="cudnn_ops"): with inductor, its options, choices and report."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import cudnn_ops
from cudnn_ops.compiler import backend, choice
from cudnn_ops.compiler import rewrite as rewriting
from cudnn_ops.compiler.choice import Chooser
from cudnn_ops.compiler.measuring import Spec
from cudnn_ops.compiler.nodes import call_of
from cudnn_ops.compiler.options import settings_of
from cudnn_ops.compiler.pattern import Found, Pattern
from cudnn_ops.compiler.patterns import PATTERNS
from cudnn_ops.compiler.report import CompileReport
from cudnn_ops.compiler.rewrite import rewrite
from cudnn_ops.plans import timing
from tests.cases import sdpa
from tests.cases.compiler import NAMES

EPS = 1e-6
ALL: dict[str, Any] = {"swap": NAMES}


class Block(nn.Module):
    """A layer of a small Llama, written as one writes it."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size, EPS)
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.gate, self.up = (nn.Linear(size, 48, bias=False) for _ in range(2))
        self.down = nn.Linear(48, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, 4, size // 4).permute(2, 0, 3, 1, 4)
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        q, k, v = heads.unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + out.transpose(1, 2).reshape(batch, length, size)
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    yield
    torch._dynamo.reset()


def _check(model: nn.Module, compiled: Any, x: Tensor) -> None:
    """Results and gradients against those of eager mode.

    In float32 they are close; in lower precision each has at most twice the error of its own.
    """
    grad = torch.randn_like(model(x))

    def results(module: nn.Module, function: Any, x: Tensor) -> list[Tensor]:
        leaf = x.detach().clone().requires_grad_()
        out = function(leaf)
        leaves = [leaf, *module.parameters()]
        return [out, *torch.autograd.grad(out, leaves, grad.to(x.dtype))]

    plain, ours = results(model, model, x), results(model, compiled, x)
    assert ours[0].stride() == plain[0].stride()
    if x.dtype == torch.float32:
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
        return
    double = copy.deepcopy(model).double()
    exact = results(double, double, x.double())
    names = ["out", "input", *(name for name, _ in model.named_parameters())]
    for name, mine, right, rough in zip(names, ours, exact, plain, strict=True):
        assert mine.dtype == rough.dtype
        sdpa.check(mine, right, rough, name)


def _swapped() -> list[str]:
    return sorted(candidate.pattern for candidate in cudnn_ops.compile_report().swapped)


def test_a_block_forward_and_backward():
    model = Block()
    compiled = torch.compile(model, backend="cudnn_ops", fullgraph=True, options=ALL)
    _check(model, compiled, torch.randn(2, 7, 32))
    assert _swapped() == ["attention", "gated", "linear", "rms_norm", "rms_norm"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.ones(2, 7, 32)), model(torch.ones(2, 7, 32)))


def test_dynamic_sizes_of_one_graph():
    model = Block()
    compiled = torch.compile(model, backend="cudnn_ops", dynamic=True, options=ALL)
    for batch, length in ((2, 7), (3, 5), (5, 11)):
        _check(model, compiled, torch.randn(batch, length, 32))
    assert "rms_norm" in _swapped()


def test_autocast_and_checkpointing():
    model = Block()

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(model, x, use_reentrant=False)

    compiled = torch.compile(run, backend="cudnn_ops", options=ALL)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(compiled(x), run(x), rtol=3e-2, atol=3e-2)
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    # In the graph that checkpointing calls.
    assert "attention" in _swapped()


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_modes(mode):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    options = {**ALL, "mode": mode}
    compiled = torch.compile(model, backend="cudnn_ops", options=options)
    _check(model, compiled, torch.randn(4, 16))
    assert _swapped() == ["layer_norm"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"swop": []}, ValueError, r"unknown options \['swop'\]; it accepts mode, swap, dry_run"),
        ({"swap": ["rmsnorm"]}, ValueError, "unknown patterns.*there are .*rms_norm"),
        ({"swap": "rms_norm"}, TypeError, "swap must be a list of patterns, got 'rms_norm'"),
        ({"mode": "fast"}, ValueError, "unknown mode 'fast'; it accepts default, reduce-overhead"),
        ({"dry_run": "yes"}, TypeError, "dry_run must be a bool"),
        ({"inductor": 3}, TypeError, "inductor must be a dict"),
    ],
)
def test_options_that_do_not_exist(options, error, message):
    with pytest.raises(error, match=message):
        settings_of(None, options)


def test_a_misspelt_option_reaches_the_user():
    compiled = torch.compile(nn.Linear(2, 2), backend="cudnn_ops", options={"swop": []})
    with pytest.raises(Exception, match="unknown options"):
        compiled(torch.ones(1, 2))


def test_modes_that_contradict_each_other():
    with pytest.raises(ValueError, match=r"'default' as an argument.*'max-autotune' as an option"):
        settings_of("default", {"mode": "max-autotune"})


def test_options_of_inductor_reach_it():
    seen = {}

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, (8,), eps=EPS)

    original = torch._inductor.compile_fx.compile_fx_inner

    def spy(*args, **kwargs):
        seen["size_asserts"] = torch._inductor.config.size_asserts
        return original(*args, **kwargs)

    options = {**ALL, "inductor": {"size_asserts": False}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor.compile_fx, "compile_fx_inner", spy)
        from torch._inductor.compile_fx import compile_fx

        patch.setattr(compile_fx, "__defaults__", (spy, *compile_fx.__defaults__[1:]))
        torch.compile(Norm(), backend="cudnn_ops", options=options)(torch.randn(3, 8))
    assert seen == {"size_asserts": False}


def test_a_dry_run_reports_and_swaps_nothing():
    model = Block()
    compiled = torch.compile(model, backend="cudnn_ops", options={**ALL, "dry_run": True})
    _check(model, compiled, torch.randn(2, 7, 32))
    report = cudnn_ops.compile_report()
    assert not report.swapped
    assert {candidate.reason for candidate in report} == {"dry run"}
    # What ends in a gated activation begins with a linear layer and an activation.
    assert {c.pattern for c in report} == {"attention", "gated", "linear", "rms_norm"}


def test_without_asking_a_cpu_is_left_alone():
    model = Block()
    compiled = torch.compile(model, backend="cudnn_ops")
    _check(model, compiled, torch.randn(2, 7, 32))
    report = cudnn_ops.compile_report()
    assert not report.swapped
    assert {candidate.reason for candidate in report} == {"its tensors are not on a GPU"}


def test_nothing_to_swap():
    model = nn.Linear(8, 8)
    _check(model, torch.compile(model, backend="cudnn_ops", options=ALL), torch.randn(3, 8))
    assert len(cudnn_ops.compile_report()) == 0


def test_only_what_is_asked_for():
    options = {"swap": ["gated"]}
    _check(
        model := Block(),
        torch.compile(model, backend="cudnn_ops", options=options),
        torch.randn(2, 7, 32),
    )
    assert _swapped() == ["gated"]
    reasons = {c.pattern: c.reason for c in cudnn_ops.compile_report() if not c.swapped}
    assert reasons["attention"] == "not among options['swap']"


def test_a_pattern_that_fails_costs_one_warning(monkeypatch):
    def find(self, node):
        raise RuntimeError("broken")
        yield

    model = Block()
    (gated,) = (pattern for pattern in PATTERNS if pattern.name == "gated")
    monkeypatch.setattr(type(gated), "find", find)
    compiled = torch.compile(model, backend="cudnn_ops", options=ALL)
    with pytest.warns(UserWarning, match="the pattern gated failed.*RuntimeError: broken"):
        _check(model, compiled, torch.randn(2, 7, 32))
    assert _swapped() == ["attention", "linear", "linear", "rms_norm", "rms_norm"]


def test_a_replacement_that_does_not_compile_is_undone(monkeypatch):
    original, calls = backend.compile_fx, []

    def fails_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("no kernel")
        return original(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_fx", fails_once)
    model = Block()
    compiled = torch.compile(model, backend="cudnn_ops", options=ALL)
    with pytest.warns(UserWarning, match="a graph does not compile with our operators.*no kernel"):
        _check(model, compiled, torch.randn(2, 7, 32))
    report = cudnn_ops.compile_report()
    assert not report.swapped
    assert all("did not compile" in candidate.reason for candidate in report)


def test_a_graph_that_depends_on_strides_is_compiled_as_it_was(monkeypatch):
    def settle(_: Any) -> int:
        raise ZeroDivisionError("of strides")

    monkeypatch.setattr(rewriting.Strides, "settle", settle)
    model = Block()
    compiled = torch.compile(model, backend="cudnn_ops", options=ALL)
    with pytest.warns(UserWarning, match="ZeroDivisionError: of strides"):
        _check(model, compiled, torch.randn(2, 7, 32))
    assert not cudnn_ops.compile_report().swapped


def test_a_replacement_within_a_checkpoint_is_undone(monkeypatch):
    original, compiled_with_ours = backend.compile_fx, []

    def fails_with_ours(module, *args, **kwargs):
        graphs = [one.graph for one in module.modules() if isinstance(one, fx.GraphModule)]
        targets = {str(node.target) for graph in graphs for node in graph.nodes}
        compiled_with_ours.append(any(target.startswith("cudnn_ops.") for target in targets))
        result = original(module, *args, **kwargs)
        if compiled_with_ours[-1]:
            raise RuntimeError("no kernel")
        return result

    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    monkeypatch.setattr(backend, "compile_fx", fails_with_ours)
    model = Checkpointed()
    compiled = torch.compile(model, backend="cudnn_ops", options=ALL)
    with pytest.warns(UserWarning, match="a graph does not compile with our operators.*no kernel"):
        _check(model, compiled, torch.randn(2, 7, 32))
    assert compiled_with_ours[0]
    assert not compiled_with_ours[-1]
    report = cudnn_ops.compile_report()
    found = {candidate.pattern for candidate in report}
    assert found == {"attention", "gated", "linear", "rms_norm"}
    assert not report.swapped
    assert all("did not compile" in candidate.reason for candidate in report)


# --- what decides ----------------------------------------------------------------------


def _rewritten(function: Any, chooser: Any, *inputs: Tensor) -> None:
    def backend(module, _):
        rewrite(module, PATTERNS, chooser, chooser.report)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


@pytest.fixture
def store(tmp_path):
    cudnn_ops.set_store(tmp_path / "store")
    choice._in_memory.clear()
    yield tmp_path / "store"
    cudnn_ops.set_store(None)
    choice._in_memory.clear()


@pytest.mark.parametrize(("ours", "is_swapped"), [(0.9, True), (0.96, True), (0.98, False)])
def test_the_faster_one_by_a_margin(store, ours, is_swapped):
    steps = []

    def clock(functions):
        for function in functions.values():
            function()
        steps.append(set(functions))
        return {"ours": ours, "stock": 1.0}

    x, w = torch.randn(3, 16, requires_grad=True), torch.randn(16)
    for _ in range(2):
        chooser = Chooser(settings_of(None, None), CompileReport(), clock)
        _rewritten(_norm, chooser, x, w)
        (candidate,) = chooser.report
        assert candidate.swapped is is_swapped
        assert (candidate.ours_ms, candidate.stock_ms) == (ours, 1.0)
    # The second time it was known, from the store.
    assert steps == [{"ours", "stock"}]
    assert len(json.loads((store / "compile_choices.json").read_text())) == 1
    assert (store / "compile_choices.json").stat().st_mode & 0o077 == 0


def test_the_store_is_read_once_for_a_graph(store, monkeypatch):
    def chooser(clock):
        return Chooser(settings_of(None, None), CompileReport(), clock)

    def norms(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _norm(x, w), _norm(x[:2], w)

    inputs = torch.randn(3, 16), torch.randn(16)
    _rewritten(norms, chooser(lambda _: {"ours": 1.0, "stock": 2.0}), *inputs)
    choice._in_memory.clear()
    stored, reads = choice._stored, []
    monkeypatch.setattr(choice, "_stored", lambda path: reads.append(path) or stored(path))
    later = chooser(lambda _: 1 / 0)
    _rewritten(norms, later, *inputs)
    assert [candidate.ours_ms for candidate in later.report] == [1.0, 1.0]
    assert reads == [store / "compile_choices.json"]


def test_other_shapes_strides_and_gradients_are_measured_again(store):
    count = 0

    def clock(_):
        nonlocal count
        count += 1
        return {"ours": 1.0, "stock": 2.0}

    w = torch.randn(16)
    leaf = torch.randn(3, 16, requires_grad=True)
    for x in (leaf, leaf.detach(), torch.randn(4, 16), torch.randn(16, 3).t(), leaf):
        _rewritten(_norm, Chooser(settings_of(None, None), CompileReport(), clock), x, w)
    assert count == 4


def test_layers_alike_are_measured_once(store):
    """Names of nodes, which a graph numbers, are not what times depend on."""
    measured = []

    def clock(functions):
        measured.append(list(functions))
        return {"ours": 1.0, "stock": 2.0}

    def layers(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = _norm(x, w).relu() @ torch.ones(16, 16)
        return x

    report = CompileReport()
    chooser = Chooser(settings_of(None, None), report, clock)
    _rewritten(layers, chooser, torch.randn(3, 16), torch.randn(16))
    assert len(report.swapped) == 4
    assert len(measured) == 1


def test_images_between_convolutions_are_measured_channels_last(store):
    strides = {}

    def clock(functions):
        for name, function in functions.items():
            (out,) = function()
            strides[name] = out.stride()
        return {"ours": 2.0, "stock": 1.0}

    def layers(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x.sin(), w, padding=1).relu()

    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    _rewritten(layers, Chooser(settings_of(None, None), CompileReport(), clock), x, w)
    assert strides == dict.fromkeys(("ours", "stock"), (256, 1, 32, 4))


def test_rows_of_images_channels_are_measured_as_rows(store, monkeypatch):
    drawn, stock = [], Spec.drawn

    def recorded(spec: Spec) -> Tensor:
        drawn.append(spec.strides)
        return stock(spec)

    monkeypatch.setattr(Spec, "drawn", recorded)

    def of_an_image(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(F.conv2d(x, w, padding=1).permute(0, 2, 3, 1), (4,), eps=1e-5)

    def of_rows(x: Tensor, w: Tensor) -> Tensor:
        rows = F.conv2d(x, w, padding=1).permute(0, 2, 3, 1).cumsum(2)
        return F.rms_norm(rows, (4,), eps=1e-5)

    def of_tokens(x: Tensor, w: Tensor) -> Tensor:
        tokens = F.conv2d(x, w, padding=1).permute(0, 2, 3, 1).reshape(2, 64, 4)
        return F.rms_norm(tokens, (4,), eps=1e-5) + tokens

    def of_the_input(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x.permute(0, 2, 3, 1), (3,), eps=1e-5)

    def of_the_input_s_tokens(x: Tensor, w: Tensor) -> Tensor:
        tokens = x.permute(0, 2, 3, 1).reshape(2, 64, 3)
        return F.rms_norm(tokens, (3,), eps=1e-5) + tokens

    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    for model, strides in (
        (of_an_image, (256, 1, 32, 4)),
        (of_rows, (256, 32, 4, 1)),
        (of_tokens, (256, 4, 1)),
        (of_the_input, (192, 64, 8, 1)),
        (of_the_input_s_tokens, (192, 1, 64)),
    ):
        drawn.clear()
        chooser = Chooser(
            settings_of(None, None), CompileReport(), lambda _: {"ours": 2.0, "stock": 1.0}
        )
        _rewritten(model, chooser, x, w)
        assert drawn[0] == strides


def test_a_trial_has_what_is_folded_for_all_convolutions_at_once(store):
    results = {}

    def clock(functions):
        for name, function in functions.items():
            (results[name],) = function()
        return {"ours": 2.0, "stock": 1.0}

    def layer(x: Tensor, w: Tensor, *norm: Any) -> Tensor:
        return F.batch_norm(F.conv2d(x, w), *norm).relu()

    norm = [torch.rand(4) + 0.5 for _ in range(4)]
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    chooser = Chooser(settings_of(None, None), CompileReport(), clock)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        _rewritten(layer, chooser, x, w, *norm)
    assert not any("the pattern" in str(one.message) for one in caught)
    # A trial's variances are any numbers, and some are negative.
    nan = {"equal_nan": True}
    torch.testing.assert_close(results["ours"], results["stock"], rtol=1e-4, atol=1e-4, **nan)


def _added_in_place(x: Tensor, norm: Tensor) -> Tensor:
    x += norm
    return x


@pytest.mark.parametrize("add", [_added_in_place, Tensor.add_])
def test_a_trial_writes_to_none_of_its_inputs(store, add):
    """ResNet adds a block's shortcut in place, here to what another kernel computed."""
    results = []

    def clock(functions):
        for function in functions.values():
            results.append([out.clone() for _ in range(3) for out in function()])
        return {"ours": 2.0, "stock": 1.0}

    def block(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        norm = F.batch_norm(x.cos(), mean, var, training=True)
        return add(x.sin(), norm).relu()

    report = CompileReport()
    chooser = Chooser(settings_of(None, None), report, clock)
    _rewritten(block, chooser, torch.randn(2, 3, 8, 8), torch.zeros(3), torch.ones(3))
    assert {candidate.pattern for candidate in report} == {"batch_norm"}
    for found in results:
        for again in found[1:]:
            torch.testing.assert_close(again, found[0], rtol=0, atol=0)


def test_a_dry_run_measures_nothing(store):
    chooser = Chooser(settings_of(None, {"dry_run": True}), CompileReport(), lambda _: 1 / 0)
    _rewritten(_norm, chooser, torch.randn(3, 16), torch.randn(16))
    assert [candidate.reason for candidate in chooser.report] == ["dry run: not measured yet"]


@pytest.mark.parametrize("content", ["{", "[]", '{"key": 1}'])
def test_a_damaged_file_of_choices_is_measured_again(store, content):
    store.mkdir(mode=0o700)
    (store / "compile_choices.json").write_text(content)
    chooser = Chooser(
        settings_of(None, None), CompileReport(), lambda _: {"ours": 1.0, "stock": 2.0}
    )
    _rewritten(_norm, chooser, torch.randn(3, 16), torch.randn(16))
    assert chooser.report.swapped
    assert len(json.loads((store / "compile_choices.json").read_text())) == 1


@pytest.mark.parametrize(
    ("times", "is_better", "reason"),
    [
        ((0.96, 1.0, 0.05, 0.05), True, ""),
        ((0.5, 1.0, 0.2, 0.1), True, ""),
        ((0.96, 1.0, 0.2, 0.1), False, "more of the host's time than it saves"),
        ((1.0, 1.0, 0.05, 0.1), True, "in less of the host's time"),
        ((1.0, 1.0, 0.098, 0.1), False, "not faster here"),
        ((1.05, 1.0, 0.01, 0.1), False, "not faster here"),
    ],
)
def test_the_host_s_time_counts(times, is_better, reason):
    """Whichever of the two a model waits for, a swap makes it no slower."""
    found = choice.Times(*times).verdict()
    assert found[0] is is_better
    assert reason in found[1]


def test_what_is_measured_has_plans_of_its_own(store):
    """As in a model that calls it often."""
    policies = []

    def clock(_):
        policies.append(cudnn_ops.plan_policy())
        return {"ours": 1.0, "stock": 2.0}

    chooser = Chooser(settings_of(None, None), CompileReport(), clock)
    _rewritten(_norm, chooser, torch.randn(3, 16), torch.randn(16))
    assert policies == ["exact"]
    assert cudnn_ops.plan_policy() == "auto"


def test_real_times_of_inductor_s_code(store):
    """The clock is real: what is compared runs, forward and backward."""

    def clock(functions):
        return timing.cpu_ms(functions, rounds=1)

    chooser = Chooser(settings_of(None, None), CompileReport(), clock)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    _rewritten(attend, chooser, *(torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)))
    (candidate,) = chooser.report
    assert candidate.ours_ms is not None
    assert candidate.stock_ms is not None
    assert candidate.ours_ms > 0 < candidate.stock_ms


def test_dynamic_sizes_are_not_measured():
    chooser = Chooser(settings_of(None, None), CompileReport(), lambda _: 1 / 0)
    torch._dynamo.reset()

    def backend(module, _):
        rewrite(module, PATTERNS, chooser, chooser.report)
        return module.forward

    torch.compile(_norm, backend=backend, dynamic=True)(torch.randn(3, 16), torch.randn(16))
    (candidate,) = chooser.report
    assert "a size is dynamic" in candidate.reason


def test_the_report_is_a_table():
    torch.compile(Block(), backend="cudnn_ops", options=ALL)(torch.randn(2, 7, 32))
    report = cudnn_ops.compile_report()
    head, columns, *rows = str(report).splitlines()
    assert head == "1 graph, 5 of 5 candidates swapped"
    assert columns.split() == [
        *("pattern", "result", "count", "swapped", "ours", "ms", "inductor", "ms"),
        *("where,", "what,", "why"),
    ]
    assert len(rows) == 4  # what is alike shares a row
    assert any("test_compiler_backend.py:" in row for row in rows)
    report.clear()
    assert str(report) == "0 graphs, 0 of 0 candidates swapped"


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(Block(), backend="cudnn_ops", options=ALL)(torch.randn(2, 7, 32))


@pytest.mark.gpu
def test_measured_on_a_gpu(store):
    """Without options: every candidate has both times, and the results are right."""
    model = Block(64).to("cuda", torch.bfloat16)
    compiled = torch.compile(model, backend="cudnn_ops")
    _check(model, compiled, torch.randn(2, 512, 64, device="cuda", dtype=torch.bfloat16))
    report = cudnn_ops.compile_report()
    assert {c.pattern for c in report} >= {"attention", "gated", "rms_norm"}
    for candidate in report:
        if "would be kept for the gradient" in candidate.reason:  # whatever its time
            continue
        assert candidate.ours_ms is not None
        assert candidate.stock_ms is not None
        if candidate.swapped:
            assert candidate.ours_ms <= choice.AS_LONG * candidate.stock_ms


@pytest.mark.gpu
def test_all_patterns_on_a_gpu():
    model = Block(64).to("cuda", torch.bfloat16)
    compiled = torch.compile(model, backend="cudnn_ops", options=ALL)
    _check(model, compiled, torch.randn(2, 512, 64, device="cuda", dtype=torch.bfloat16))
    assert _swapped() == ["attention", "gated", "linear", "rms_norm", "rms_norm"]


def test_what_a_swap_has_put_there_is_not_swapped_again():
    """Its nodes have one place, before which nothing else of it can be put."""

    class Squashed(Pattern):
        name = "squashed"
        ends_in = frozenset({"sigmoid"})

        def find(self, node: fx.Node):
            call = call_of(node)
            assert call is not None
            source = call["input"]
            yield Found([node], [node], [source], lambda x: F.linear(x, x) + x.cos())

    def function(x: Tensor) -> Tensor:
        return x.sigmoid()

    report = CompileReport()

    def backend(module: fx.GraphModule, _: Any) -> Any:
        rewrite(module, (Squashed(), *PATTERNS), lambda *_: True, report)
        return module.forward

    x = torch.randn(4, 4)
    out = torch.compile(function, backend=backend)(x)
    torch.testing.assert_close(out, F.linear(x, x) + x.cos())
    assert [(one.pattern, one.swapped) for one in report] == [("squashed", True), ("linear", False)]
    assert report.candidates[1].reason == "an input is computed only after a result is used"
