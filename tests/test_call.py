"""Calls past torch.ops are the calls of torch.ops: results, errors, and whoever else sees them."""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_ops import _fast
from cudnn_ops.collect_env import collect_env
from tests.cases.calls import FAST, Call, make, mistakes
from tests.conftest import DEVICES, deterministic

DTYPES = {"cpu": torch.float64, "cuda": torch.bfloat16}
ON_CPU = make("cpu", torch.float64)
#: One of each overload.
ONE_EACH = list({one.overload: one for one in reversed(ON_CPU)}.values())
#: Of the arguments, those that have no gradient.
CONSTANT = ("alibi_slopes", "cos", "sin", "running_mean", "running_var")
ONE_RMS = Call("rms_norm", (), {})
DIFFERENTIABLE = [one for one in ON_CPU if "paged" not in one.overload]


def outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a call gives, in a form that is equal to another's where both calls are."""
    torch.manual_seed(0)
    try:
        return described(function(*args, **kwargs))
    except Exception as error:
        return type(error), str(error), type(error.__cause__)


def described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return (type(value), [described(part) for part in value]) if value else value
    if value.is_meta or isinstance(value, torch._subclasses.FakeTensor):
        numbers: object = None
    else:
        numbers = value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
    kind = type(value), value.dtype, value.shape, value.stride(), value.device
    return *kind, value.requires_grad, type(value.grad_fn).__name__, numbers


def assert_same(call: Call, args: Any = None, kwargs: Any = None) -> Any:
    fast, op = call.both
    args = call.args if args is None else args
    kwargs = call.kwargs if kwargs is None else kwargs
    expected, found = outcome(op, args, kwargs), outcome(fast, args, kwargs)
    assert found == expected, (call, args, kwargs)
    return found


def counting(call: Call) -> tuple[Callable[..., Any], list[int]]:
    """What calls the operator, and how many times it went through torch.ops."""
    op, seen = call.both[1], [0]

    def through_torch(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        return op(*args, **kwargs)

    name, _, overload = call.overload.partition(".")
    return _fast.callable(name, overload, through_torch), seen


def requiring_grad(call: Call) -> Call:
    def leaf(value: object) -> object:
        is_leaf = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().clone().requires_grad_() if is_leaf else value  # type: ignore

    named = {
        name: value if name in CONSTANT else leaf(value) for name, value in call.by_name().items()
    }
    return Call(call.overload, (), named)


@pytest.mark.parametrize("device", DEVICES)
def test_results(device):
    for call in make(device, DTYPES[device]):
        found = assert_same(call)
        # A GPU may refuse some: by the same words.
        assert device == "cuda" or found is None or found[0] in (torch.Tensor, tuple), found


def test_every_overload_has_a_case():
    assert set(FAST) == {call.overload for call in ON_CPU}
    assert all(fast.__name__ == name.partition(".")[0] for name, (fast, _) in FAST.items())


@pytest.mark.parametrize("call", ON_CPU, ids=str)
def test_plain_calls_do_not_pass_torch_ops(call):
    fast, seen = counting(call)
    fast(*call.args, **call.kwargs)
    fast(**call.by_name())
    parameters = {
        name: torch.nn.Parameter(value, value.is_floating_point())
        if isinstance(value, Tensor) and "cache" not in name
        else value
        for name, value in call.by_name().items()
    }
    for name in CONSTANT:
        if parameters.get(name) is not None:
            parameters[name].requires_grad_(False)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.inference_mode():
        fast(**parameters)
    assert seen == [0]


@pytest.mark.parametrize("call", ONE_EACH, ids=str)
def test_arguments_in_any_form(call):
    schema = call.both[1]._schema.arguments
    complete = {
        argument.name: argument.default_value for argument in schema if argument.has_default_value()
    } | call.by_name()
    complete = {argument.name: complete[argument.name] for argument in schema}
    positional = [argument.name for argument in schema if not argument.kwarg_only]
    draw = random.Random(0)
    for count in range(len(positional) + 1):
        for _ in range(4):
            left = [*complete][count:]
            draw.shuffle(left)
            args = [complete[name] for name in positional[:count]]
            assert_same(call, args, {name: complete[name] for name in left})
            # In another string object than the compiler's.
            assert_same(call, args, {"".join([*name]): complete[name] for name in left})
    for name in complete:  # given twice, left out, too many, unknown
        assert_same(call, [*complete.values()][: len(positional)], {name: complete[name]})
        assert_same(call, (), {other: complete[other] for other in complete if other != name})
    assert_same(call, [*complete.values()] * 2, {})
    assert_same(call, call.args, call.kwargs | {"nonsense": 1})
    assert_same(call, (), {})


# With and without the log-sum-exp, the arguments are read by the same code.
@pytest.mark.parametrize(
    "call", [one for one in ONE_EACH if not one.overload.endswith("with_lse")], ids=str
)
def test_wrong_values(call):
    errors = 0
    tensor = next(value for value in call.args if isinstance(value, Tensor)).clone()
    for name in call.by_name() | dict.fromkeys(a.name for a in call.both[1]._schema.arguments):
        for value in mistakes(tensor):
            found = assert_same(call, (), call.by_name() | {name: value})
            errors += isinstance(found, tuple) and issubclass(found[0], Exception)
    assert errors > 20


@pytest.mark.parametrize("call", DIFFERENTIABLE, ids=str)
@pytest.mark.parametrize("hooks", [False, True])
def test_gradients(call, hooks):
    def run(function: Callable[..., Any]) -> Any:
        call_ = requiring_grad(call)
        saved = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append((tensor.shape, tensor.dtype))
            return tensor.clone()

        hooked = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooked if hooks else nullcontext(), torch.autograd.detect_anomaly(check_nan=False):
            results = function(**call_.kwargs)
            results = results if isinstance(results, tuple) else (results,)
            sum(result.double().sin().sum() for result in results).backward()
        grads = [value.grad for value in call_.kwargs.values() if isinstance(value, Tensor)]
        return [described(x) for x in (*results, *grads) if x is not None], saved

    fast, op = call.both
    assert run(fast) == run(op)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("call", ON_CPU, ids=str)
def test_contexts(call):
    small = Call(
        call.overload,
        (),
        {
            name: value.float()
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in call.by_name().items()
        },
    )
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert_same(small)
    with torch.inference_mode():
        assert_same(call)
    with deterministic():
        assert_same(requiring_grad(call))
    with torch.no_grad():
        assert_same(requiring_grad(call))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Subclass.seen.append((func, types, len(args), sorted(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("mode", [Functions, Dispatches])
@pytest.mark.parametrize("call", ON_CPU, ids=str)
def test_modes_see_what_they_would(call, mode):
    def run(function: Callable[..., Any]) -> Any:
        with mode() as entered:
            found = outcome(function, call.args, call.kwargs)
        return found, entered.seen

    fast, op = call.both
    found, seen = run(fast)
    assert seen
    assert (found, seen) == run(op)


@pytest.mark.parametrize("call", ON_CPU, ids=str)
def test_subclasses_see_what_they_would(call):
    for name, value in call.by_name().items():
        if not isinstance(value, Tensor):
            continue
        kwargs = call.by_name() | {name: value.as_subclass(Subclass)}
        Subclass.seen.clear()
        assert_same(call, (), kwargs)
        half = len(Subclass.seen) // 2
        assert half
        assert Subclass.seen[:half] == Subclass.seen[half:]


@pytest.mark.parametrize("call", ON_CPU, ids=str)
def test_fake_tensors(call):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in call.by_name().items()
        }
        assert_same(call, (), fakes)
        assert_same(call)
    assert_same(call, (), fakes)


def test_a_default_device_is_a_mode():
    call = Call("swiglu", (torch.ones(2), torch.ones(2)), {})
    fast, seen = counting(call)
    with torch.device("cpu"):
        fast(*call.args)
    assert seen == [1]


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "vmap": torch.vmap,
    "grad": lambda norm: torch.func.grad(lambda x: norm(x).sin().sum()),
    "vmap of grad": lambda norm: torch.vmap(torch.func.grad(lambda x: norm(x).sin().sum())),
    "functionalize": torch.func.functionalize,
    "jvp": lambda norm: lambda x: torch.func.jvp(norm, (x,), (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform):
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    fast, seen = counting(ONE_RMS)
    found, expected = (
        outcome(TRANSFORMS[transform](lambda x, f=f: f(x, (16,))), (x,), {})
        for f in (fast, ONE_RMS.both[1])
    )
    assert found == expected
    assert (found[0] is NotImplementedError) == (transform == "jvp")
    assert seen == [1]


@pytest.mark.parametrize("call", ON_CPU, ids=str)
def test_tracers_record_the_overload(call):
    fast, op = call.both
    named = call.by_name()
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def calling(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: function(**(named | dict(zip(tensors, values, strict=True))))

    def targets(graph: torch.fx.GraphModule) -> list[Any]:
        return [node.target for node in graph.graph.nodes]

    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    found = torch.compile(calling(fast), fullgraph=True, backend=backend)(*tensors.values())
    assert described(found) == described(op(**named))
    (graph,) = graphs
    assert op in targets(graph)

    made = [targets(make_fx(calling(function))(*tensors.values())) for function in (fast, op)]
    assert made[0] == made[1]
    assert any("cudnn_ops" in str(target) for target in made[0])
    exported = [
        targets(torch.export.export(Module(calling(f)), (*tensors.values(),)).graph_module)
        for f in (fast, op)
    ]
    assert exported[0] == exported[1]
    assert op in exported[0]


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def test_what_traces_python_records_the_overload():
    fast, op = FAST["swiglu"]
    traced = torch.fx.symbolic_trace(lambda x, y: fast(x, y))
    assert op in [node.target for node in traced.graph.nodes]
    x = torch.randn(2, 8)
    script = torch.jit.trace(lambda x: fast(x, x), (x,))
    assert "cudnn_ops::swiglu" in str(script.graph)
    assert torch.equal(script(x), op(x, x))


@pytest.mark.parametrize("call", ONE_EACH, ids=str)
def test_profiles(call):
    def events(function: Callable[..., Any]) -> list[Any]:
        with torch.profiler.profile(record_shapes=True) as profile:
            function(*call.args, **call.kwargs)
        return [(event.name, event.input_shapes) for event in profile.events()]

    fast, op = call.both
    found = events(fast)
    assert found == events(op)
    assert found[0][0] == op._name.partition(".")[0]


def test_an_error_of_python_within_a_call_is_itself():
    x = torch.ones(2, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: 1 / 0, lambda x: x)
    with hooks, pytest.raises(ZeroDivisionError) as raised:
        FAST["swiglu"][0](x, x)
    assert raised.traceback[-1].name == "<lambda>"


def test_nothing_is_left_behind():
    x, weight = torch.ones(2, 1000), torch.ones(1000)
    shape, number = (1000,), 1234.5
    fast = FAST["rms_norm"][0]
    counts = [sys.getrefcount(value) for value in (x, weight, shape, number)]
    uses = x._use_count(), weight._use_count()
    for _ in range(100):
        fast(x, shape, weight, eps=number)
        with pytest.raises(ValueError, match="must end with"):
            fast(x, (1001,), weight, number)
        with pytest.raises(RuntimeError):
            fast(x, shape, "weight", eps=number)
        with pytest.raises(RuntimeError):
            fast(x, shape, weight, nonsense=number)
    gc.collect()
    assert counts == [sys.getrefcount(value) for value in (x, weight, shape, number)]
    assert uses == (x._use_count(), weight._use_count())


def test_threads():
    x = torch.randn(8, 64)
    expected = FAST["rms_norm"][1](x, (64,))
    wrong = []

    def work(has_mode: bool) -> None:
        fast, seen = counting(ONE_RMS)
        with Functions() if has_mode else nullcontext():
            for _ in range(200):
                if not torch.equal(fast(x, (64,)), expected):
                    wrong.append(has_mode)
        if seen[0] != 200 * has_mode:
            wrong.append(seen)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


WITHOUT = """
import sys
sys.modules["cudnn_ops._fast"] = None  # as if it could not be loaded
import torch, cudnn_ops
from cudnn_ops.collect_env import collect_env
from cudnn_ops.ops import call, sdpa
assert not call._FAST
assert collect_env()["calls past torch.ops"].startswith("no")
assert sdpa._sdpa is torch.ops.cudnn_ops.sdpa.default
x = torch.randn(2, 3, 5, 8)
out = cudnn_ops.scaled_dot_product_attention(x, x, x, is_causal=True)
compiled = torch.compile(cudnn_ops.rms_norm, fullgraph=True, backend="eager")
print(out.shape == x.shape, compiled(x, (8,)).shape == x.shape)
"""


def test_without_the_module_torch_ops_is_called():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_the_environment_tells():
    assert collect_env()["calls past torch.ops"] == "yes"


def test_no_other_operators():
    with pytest.raises(LookupError, match=r"no fast calls of _quantize_fp8\.$"):
        _fast.callable("_quantize_fp8", "", None)
    with pytest.raises(LookupError, match=r"no fast calls of swiglu\.options"):
        _fast.callable("swiglu", "options", None)


def test_python_finds_the_address_that_the_module_found():
    x = torch.empty(0)
    words = (ctypes.c_size_t * (torch.Tensor.__basicsize__ // 8)).from_address(id(x))
    assert [*words].count(x._cdata) == 1
