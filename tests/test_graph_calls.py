"""Code that inductor generates calls our operators past torch.ops, and in its cache does so too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import cudnn_ops
from cudnn_ops import _fast
from cudnn_ops.ops import inductor
from cudnn_ops.ops.call import graph_call, has_graph_call
from tests.cases.calls import mistakes
from tests.test_call import (
    DIFFERENTIABLE,
    ON_CPU,
    Dispatches,
    Functions,
    Subclass,
    outcome,
    requiring_grad,
)

ROOT = Path(__file__).parents[1]
_ops = torch.ops.cudnn_ops


def names_of(op: torch._ops.OpOverload) -> tuple[str, str]:
    return op._schema.name.removeprefix("cudnn_ops::"), op._schema.overload_name


def of_graphs() -> list[torch._ops.OpOverload]:
    """The operators that a graph can have: those with a kernel for CPUs."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return [op for op in inductor.operators() if op.name() in names]


class Recorded(TorchDispatchMode):
    """The calls that graphs would have of operators of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "cudnn_ops" and has_graph_call(func):
            self.calls.append((func, args, kwargs or {}))
        return result


def record() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Calls of every operator, forward and backward, on small tensors."""
    torch.manual_seed(0)
    with Recorded() as recorded:
        for call in ON_CPU:
            call.both[1](*call.args, **call.kwargs)
        for call in DIFFERENTIABLE:
            results = call.both[1](**requiring_grad(call).kwargs)
            results = results if isinstance(results, tuple) else (results,)
            sum(result.sum() for result in results if result.requires_grad).backward()
        _run_others()
    return recorded.calls


def _run_others() -> None:
    """Operators that public functions reach through Python."""
    x, weight = (torch.randn(s).double().requires_grad_() for s in ((6, 8), (3, 8, 8)))
    experts = torch.tensor([[0, 1], [2, 1], [0, 2], [1, 0], [2, 0], [1, 2]])
    rows, offsets, positions = cudnn_ops.moe_permute(x, experts, 3)
    out = cudnn_ops.grouped_linear(rows, weight, offsets)
    weights = torch.rand(6, 2).double().requires_grad_()
    cudnn_ops.moe_combine(out, positions, weights).sum().backward()
    query = torch.randn(1, 2, 4, 8)
    cudnn_ops.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    _ops._gated_(torch.randn(2, 8), torch.randn(2, 8), 1)
    kernels, row = [torch.randn(3, 2, 1, 1), torch.randn(3, 4, 3, 3)], torch.rand(3)
    both, one = [row, row], [None, row]
    _ops._fold_batch_norms(kernels, one, both, both, one, both, [1e-3, 1])
    _ops._fold_batch_norms(kernels[:1] * 20, *[[row] * 20] * 5, [1e-3] * 20)


CALLS = record()
#: One of each operator.
ONE_EACH = list({call[0]: call for call in reversed(CALLS)}.values())
#: Arguments that fast calls do not read, or what seldom is called.
SLOW = {
    *("_dequantize_fp8", "_quantize_fp8", "_rotary_fp8", "_rows_fp8", "_sdpa_fp8", "_sdpa_mxfp8"),
    *("_sdpa_fp8_backward", "_varlen_fp8", "_ring_attention"),
    *("_ring_attention_backward", "_merge_attention_state_", "_paged_attention_out", "_paged_plan"),
}


def _name(call: Any) -> str:
    return str(call[0]) if isinstance(call, tuple) else ""


def counting(op: torch._ops.OpOverload) -> tuple[Callable[..., Any], list[int]]:
    """The fast call, and how many of its calls went through torch.ops."""
    seen = [0]

    def through_torch(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        return op(*args, **kwargs)

    return _fast.callable(*names_of(op), through_torch), seen


def test_every_operator_of_graphs_is_fast():
    fast = {op for op in of_graphs() if has_graph_call(op)}
    assert {names_of(op)[0] for op in of_graphs()} - {names_of(op)[0] for op in fast} == SLOW
    assert fast == {op for op, _, _ in CALLS}


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_results(call):
    op, args, kwargs = call
    fast, seen = counting(op)
    # What is written to is another tensor each time.
    runs = [outcome(function, *tree_map(_copied, (args, kwargs))) for function in (op, fast)]
    assert runs[0] == runs[1]
    assert seen == [0]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("call", ONE_EACH, ids=_name)
def test_only_the_first_result(call):
    op, args, kwargs = call
    torch.manual_seed(0)
    expected = op(*args, **kwargs)
    torch.manual_seed(0)
    found = graph_call(*names_of(op), is_first_read=True)(*args, **kwargs)
    if isinstance(expected, tuple):
        assert len(found) == 1
        expected, found = expected[0], found[0]
    for one, right in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if right is not None:
            assert torch.equal(one, right)
            assert one.stride() == right.stride()


@pytest.mark.parametrize("call", ONE_EACH, ids=_name)
def test_wrong_values(call):
    op, args, kwargs = call
    fast = graph_call(*names_of(op))
    tensor = next(value for value in tree_leaves(args) if isinstance(value, Tensor)).clone()
    for place in range(len(args)):
        for value in (*mistakes(tensor), [True] * 9, [True, 1], (True, True, True)):
            if isinstance(value, Tensor) and value.is_meta:
                continue  # results have memory, and nobody writes there
            wrong = [*args]
            wrong[place] = value
            copies = [tree_map(_plain_copied, wrong) for _ in range(2)]
            found = [outcome(f, c, kwargs) for f, c in zip((op, fast), copies, strict=True)]
            assert found[0] == found[1], (place, value)


def _plain_copied(value: Any) -> Any:
    return value.clone() if type(value) is Tensor and not value.is_sparse else value


@pytest.mark.parametrize("mode", [Functions, Dispatches])
@pytest.mark.parametrize("call", ONE_EACH, ids=_name)
def test_modes_see_what_they_would(call, mode):
    op, args, kwargs = call

    def run(function: Callable[..., Any]) -> Any:
        with mode() as entered:
            found = outcome(function, *tree_map(_copied, (args, kwargs)))
        return found, entered.seen

    found, seen = run(graph_call(*names_of(op)))
    assert seen
    assert (found, seen) == run(op)


def test_subclasses_see_what_they_would():
    op, args, kwargs = next(call for call in ONE_EACH if call[0] is _ops._conv.default)
    Subclass.seen.clear()
    graph_call("_conv", "", is_first_read=True)(args[0].as_subclass(Subclass), *args[1:], **kwargs)
    assert Subclass.seen[0][0] is op


class Block(nn.Module):
    """What a model for images has: convolutions of pixels and of planes, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.act = nn.Conv2d(4, 8, 1), nn.Hardswish()
        self.plane = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.narrow = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.act(self.plane(self.act(self.wide(x))))) + x


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    dynamic = options.pop("dynamic", None)
    chosen: Any = {"swap": ["convolution"], "inductor": options}
    return torch.compile(
        function, backend="cudnn_ops", options=chosen, fullgraph=True, dynamic=dynamic
    )


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    with torch._inductor.utils.fresh_cache():
        yield


def check_calls(code: str, *, first: int, all_of: int = 0) -> None:
    """Which calls it has, and that it looks at no size of theirs again."""
    assert "torch.ops.cudnn_ops" not in code
    assert code.count(" = cudnn_ops__conv_first(") == first
    assert code.count(" = cudnn_ops__conv(") == all_of
    assert code.count("from cudnn_ops.ops.call import graph_call") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_inference(model, x, dynamic):
    with torch.no_grad():
        found, (code,) = run_and_get_code(compiled(model, dynamic=dynamic), x)
        check_calls(code, first=6)
        torch.testing.assert_close(found, model(x))
        if dynamic:
            more = torch.randn(3, 4, 9, 8).to(memory_format=torch.channels_last)
            call = compiled(model, dynamic=True)
            call(x)
            with torch.compiler.set_stance("fail_on_recompile"):
                torch.testing.assert_close(call(more), model(more))


def test_no_call_passes_torch_ops(model, x, monkeypatch):
    called = []

    def through_torch(op: torch._ops.OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        called.append(op)  # by the CPU's kernels, which are Python
        return op._op(*args, **kwargs)

    call = compiled(model)
    with torch.no_grad():
        expected = call(x)
        monkeypatch.setattr(torch._ops.OpOverload, "__call__", through_torch)
        assert torch.equal(call(x), expected)
    assert called
    assert not [op for op in called if has_graph_call(op)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_training(model, x, dynamic):
    x.requires_grad_()
    call = compiled(model, dynamic=dynamic)
    _, codes = run_fw_bw_and_get_code(lambda: call(x))
    # The activation's input is kept for its gradient.
    check_calls(codes[0], first=2, all_of=4)
    assert " = cudnn_ops__conv_backward(" in codes[1]
    assert "torch.ops.cudnn_ops" not in codes[1]
    tensors = [x, *model.parameters()]
    for context in (torch.enable_grad(), torch.autograd.graph.save_on_cpu()):
        with context:
            found = torch.autograd.grad(call(x).square().sum(), tensors)
            expected = torch.autograd.grad(model(x).square().sum(), tensors)
        torch.testing.assert_close(found, expected)


def test_a_batch_norm_writes_its_statistics():
    norm, stock = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    x = torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    call = torch.compile(norm, backend="cudnn_ops", options={"swap": ["batch_norm"]})
    found, (code, *_) = run_and_get_code(call, x)
    assert "cudnn_ops__batch_norm_training(" in code
    torch.testing.assert_close(found, stock(x))
    torch.testing.assert_close(norm.running_mean, stock.running_mean)
    torch.testing.assert_close(norm.running_var, stock.running_var)


def test_a_call_of_a_submodule(x):
    """The branches' code is that of graphs within the graph."""
    weight = torch.randn(4, 4, 1, 1)

    def branches(x: Tensor, one: Tensor, weight: Tensor) -> Tensor:
        return torch.cond(
            one.sum() > 0,
            lambda x, weight: cudnn_ops.conv2d(x, weight, activation="relu"),
            lambda x, weight: cudnn_ops.conv2d(x, weight, activation="silu"),
            (x, weight),
        )

    call = compiled(branches)
    for one, act in ((torch.ones(1), F.relu), (-torch.ones(1), F.silu)):
        with torch.no_grad():
            found, codes = run_and_get_code(call, x, one, weight)
            torch.testing.assert_close(found, act(F.conv2d(x, weight)))
        assert all(code.count(" = cudnn_ops__conv_first(") == 2 for code in codes)


def test_a_graph_in_partitions(model, x):
    split = ["aten::convolution", "cudnn_ops::_conv"]
    call = compiled(model, graph_partition=True, custom_should_partition_ops=split)
    with torch.no_grad():
        found, (code,) = run_and_get_code(call, x)
        torch.testing.assert_close(found, model(x))
    assert code.count(" = cudnn_ops__conv_first(") == 6


def test_code_in_cpp_calls_the_operators(model, x):
    with torch.no_grad():
        found, (code,) = run_and_get_code(compiled(model, cpp_wrapper=True), x)
        torch.testing.assert_close(found, model(x))
    assert "graph_call" not in code
    assert "cudnn_ops__conv" not in code
    assert "cudnn_ops._conv.default" in code


def test_unread_results_are_read_where_nothing_is_removed(model, x):
    with torch.no_grad(), config.patch(use_dce=False):
        found, (code,) = run_and_get_code(compiled(model), x)
        torch.testing.assert_close(found, model(x))
    check_calls(code, first=0, all_of=6)


PROCESS = """
import sys
if sys.argv[1] == "slow":
    sys.modules["cudnn_ops._fast"] = None  # as if it could not be loaded
import torch
from torch._dynamo.utils import counters
assert "cudnn_ops" not in sys.modules
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1))
x = torch.randn(2, 4, 6, 5)
options = {"swap": ["convolution"]}
compiled = torch.compile(model, backend="cudnn_ops", options=options, fullgraph=True)
for trains in (False, True):
    with torch.set_grad_enabled(trains):
        torch.testing.assert_close(compiled(x), model(x))
    if trains:
        compiled(x).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(grads, [p.grad for p in model.parameters()])
print(counters["aot_autograd"]["autograd_cache_hit"], len(counters["graph_break"]))
"""


def test_another_process_is_served_by_the_cache(tmp_path):
    """It has the package from the entry point alone, and in the end no fast calls."""
    info = tmp_path / "site" / "cudnn_ops-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cudnn_ops\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\ncudnn_ops = cudnn_ops.compiler.backend:cudnn_ops\n"
    )
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(info.parent)]),
    }
    hits = []
    for kind in ("first", "second", "slow"):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, kind],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        hits.append(done.stdout.split())
    assert hits == [["0", "0"], ["2", "0"], ["2", "0"]]
    written = [path.read_text() for path in (tmp_path / "cache").rglob("*.py")]
    assert any(" = cudnn_ops__conv_first(" in code for code in written)
