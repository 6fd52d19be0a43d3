"""Times of a trial's two graphs, for many trials at once: compiled together, timed one by one.

Of what inductor needs for a small graph most is waiting for its kernels, which other processes
compile. Nobody waits here before all graphs are lowered: the kernels of one are compiled while the
next one is traced. Only then are tensors drawn, for one trial after the other, and functions run.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from cudnn_ops import _C
from cudnn_ops.compiler.memory_order import CONVOLUTIONS
from cudnn_ops.compiler.nodes import call_of, line_of, memory_given_to, memory_of_result, value_of
from cudnn_ops.compiler.pattern import Found, Pattern
from cudnn_ops.compiler.trial import trial_of
from cudnn_ops.plans.policy import Policy, using_plan_policy

#: A compiled graph is called often, with these shapes: it gets the plans of shapes that are.
POLICY: Policy = "exact"
#: How those of convolutions get their engines.
_ENGINES = "measured without gradients"
#: The memory order of the gradients that a trial's backward begins with.
_GRADIENTS = "as the results"

Steps = dict[str, Callable[[], object]]


class Spec(NamedTuple):
    """What a tensor of a trial is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    device: torch.device

    @classmethod
    def of(cls, node: fx.Node, pattern: Pattern) -> Spec | None:
        """As it is when the graph runs; None for what is no tensor."""
        if (value := value_of(node)) is None:
            return None
        shape, strides = tuple(value.shape), strides_of(node, pattern)
        return cls(value.dtype, shape, strides, value.requires_grad, value.device)

    @classmethod
    def like(cls, tensor: Tensor) -> Spec:
        """Without a gradient."""
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return cls(tensor.dtype, shape, strides, False, tensor.device)

    def empty(self) -> Tensor:
        """Whatever is in its memory."""
        empty = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return empty.requires_grad_(self.requires_grad and torch.is_grad_enabled())

    def drawn(self) -> Tensor:
        """With random numbers; integers, which may be places in something, are ones."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        # By its memory: what was expanded has less of that than elements, and cannot be filled.
        memory = torch.empty(last + 1, dtype=self.dtype, device=self.device)
        memory = memory.normal_() if self.dtype.is_floating_point else memory.fill_(1)
        tensor = memory.as_strided(self.shape, self.strides)
        return tensor.requires_grad_(self.requires_grad and torch.is_grad_enabled())


class Question(NamedTuple):
    """What is to be timed, by itself: the graph that it was found in may change.

    Attributes:
        key: what the times depend on, and nothing else.
        graphs: by name, ``"ours"`` and ``"stock"``: the replacement and what the model computes.
        inputs: the tensors that both read.
        beforehand: what makes of these what ``"ours"`` reads besides, and is not timed.
    """

    key: str
    graphs: Mapping[str, Source]
    inputs: tuple[Spec | None, ...]
    beforehand: Source | None

    @classmethod
    def of(cls, pattern: Pattern, found: Found) -> Question:
        trial = trial_of(found)
        inputs = tuple(Spec.of(node, pattern) for node in trial.inputs)
        graphs = {"ours": Source(trial.ours), "stock": Source(trial.stock)}
        beforehand = None if trial.beforehand is None else Source(trial.beforehand)
        # Not of modules, whose making compiles them.
        computations = tuple(one.code for one in graphs.values())
        return cls(_key(pattern, computations, inputs), graphs, inputs, beforehand)

    @property
    def has_gradients(self) -> bool:
        """Whether its steps have a backward."""
        needed = any(spec is not None and spec.requires_grad for spec in self.inputs)
        return needed and torch.is_grad_enabled()

    @property
    def gpus(self) -> set[torch.device]:
        devices = {spec.device for spec in self.inputs if spec is not None}
        return {device for device in devices if device.type == "cuda"}

    def more(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What ``"ours"`` reads besides."""
        if self.beforehand is None:
            return ()
        with torch.no_grad():
            made: Sequence[Any] = fx.GraphModule({}, self.beforehand.graph)(*inputs)
        return made


class Source:
    """A graph of a trial, and what it computes while nothing has changed it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.code = "\n".join(map(line_of, graph.nodes))

    @property
    def meaning(self) -> str:
        """The computation, whatever part of a trial the nodes are."""
        names: dict[str, str] = {}
        return _NUMBERED.sub(lambda one: names.setdefault(one[0], f"_{len(names)}"), self.code)


_NUMBERED = re.compile(r"\b(?:value|leader|follower)_\d+\b")


def _key(pattern: Pattern, computations: tuple[str, ...], inputs: Sequence[Spec | None]) -> str:
    """What times depend on: the computation, its tensors, the GPU and the versions."""
    tensors = [one and (str(one.dtype), *one[1:4]) for one in inputs]
    device = next((one.device for one in inputs if one is not None), torch.device("cpu"))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = (
        *(pattern.name, computations, tensors, torch.is_grad_enabled(), where),
        *(torch.__version__, _C.cudnn_version(), _C.versions()["graphs"]),
        *(POLICY, _ENGINES, _GRADIENTS),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def strides_of(node: fx.Node, pattern: Pattern) -> tuple[int, ...]:
    """Those that it has when the graph runs: between convolutions images are channels last.

    Inductor lays them out so, whatever the model's memory is, and so do our operators. What reads
    such images as rows of channels, with the channels permuted to the end, finds rows then.
    """
    value = value_of(node)
    assert value is not None
    if value.dim() == 3 and _is_channels_first_memory(value) and _is_of_image(node):
        return make_contiguous_strides_for(value.shape)
    if value.dim() in (4, 5) and _is_computed(node):
        call = call_of(node)
        if pattern.of_images or (call is not None and call.name in CONVOLUTIONS):
            return make_channels_last_strides_for(value.shape)
        if _is_channels_first_memory(value):
            return make_contiguous_strides_for(value.shape)
    return value.stride()


def _is_channels_first_memory(value: Tensor) -> bool:
    """Whether ``value.movedim(-1, 1)`` is contiguous, as of images in channels-first memory.

    By plain numbers, since torch dispatches to make a view of a tensor without memory.
    """
    order = (0, value.dim() - 1, *range(1, value.dim() - 1))
    shape, strides = (tuple(map(of.__getitem__, order)) for of in (value.shape, value.stride()))
    dense = make_contiguous_strides_for(shape)
    return all(n == 1 or mine == full for n, mine, full in zip(shape, strides, dense, strict=True))


def _is_of_image(node: fx.Node) -> bool:
    """Whether it is a view of a computed image, whose pixels are the tokens of a transformer."""
    memory, shown = memory_of_result(node), node
    while (value := value_of(shown)) is not None and value.dim() not in (4, 5):
        sources = [one for one in shown.all_input_nodes if memory & memory_of_result(one)]
        if len(sources) != 1:
            return False
        (shown,) = sources
    return value is not None and _is_computed(node)


def _is_computed(node: fx.Node) -> bool:
    """Whether it is memory of the graph's own, and no view of what the graph was given."""
    return memory_of_result(node).isdisjoint(memory_given_to(node.graph))


class _Compiled:
    """What inductor makes of a graph, whose kernels may still be in the making."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[Any]) -> None:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        options = {
            # A backward, too, which is compiled when it is first called otherwise.
            "force_non_lazy_backward_lowering": True,
            # Heads are a transposed view, and so are their gradients in a model.
            "guess_tangent_strides_as_outputs": True,
        }
        with config.patch(options), _kernels_later() as waiting:
            self._function: Any = compile_fx(fx.GraphModule({}, graph), list(inputs))
        self._waiting = waiting

    def wait(self) -> None:
        while self._waiting:
            self._waiting.pop()()

    def step(self, inputs: Sequence[Any]) -> Callable[[], object]:
        """One call, and its gradients where there are any."""
        function = self._function
        leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        grads = [Spec.like(x).drawn() if x.requires_grad else None for x in function(*inputs)]

        def step() -> object:
            results = function(*inputs)
            roots = [x for x, grad in zip(results, grads, strict=True) if grad is not None]
            if not leaves or not roots:
                return results
            along = [grad for grad in grads if grad is not None]
            return torch.autograd.grad(roots, leaves, along, allow_unused=True)

        step()
        return step


class Compiler:
    """Compiles graphs of trials, each once: all readings of one place have one stock graph."""

    def __init__(self) -> None:
        self._compiled: dict[object, _Compiled] = {}

    def lower(self, question: Question) -> None:
        """Both graphs; their kernels may be in the making for longer."""
        with _aside(question):
            for name in question.graphs:
                self._graph(question, name)

    def wait(self, question: Question) -> None:
        """For the kernels."""
        with _aside(question):
            for name in question.graphs:
                self._graph(question, name).wait()

    @contextmanager
    def steps(self, question: Question) -> Iterator[Steps]:
        """Both graphs' functions by name, of random tensors, in a context to time them in."""
        self.wait(question)
        # Named, or torch would warn of a machine with several GPUs.
        rng = torch.random.fork_rng(devices=[device.index or 0 for device in question.gpus])
        with _aside(question), rng, using_plan_policy(POLICY):
            inputs = [None if spec is None else spec.drawn() for spec in question.inputs]
            more = {"ours": question.more(inputs), "stock": ()}
            steps: Steps = {}
            for name in question.graphs:
                is_measured = name == "ours" and not question.has_gradients
                with engines_measured() if is_measured else nullcontext():
                    steps[name] = self._graph(question, name).step([*inputs, *more[name]])
            yield steps

    def _graph(self, question: Question, name: str) -> _Compiled:
        source, is_ours = question.graphs[name], name == "ours"
        beforehand = question.beforehand if is_ours else None
        sources = source.meaning, beforehand and beforehand.meaning
        key = sources, question.inputs, torch.is_grad_enabled()
        if key not in self._compiled:
            with FakeTensorMode():
                inputs = [None if spec is None else spec.empty() for spec in question.inputs]
                more = question.more(inputs) if is_ours else ()
            self._compiled[key] = _Compiled(source.graph, [*inputs, *more])
        return self._compiled[key]


@contextmanager
def engines_measured() -> Iterator[None]:
    """Convolutions whose plans are made inside get their fastest engine, which the model then has.

    As under ``torch.backends.cudnn.benchmark``. Not where there are gradients: each step of a
    convolution has thirty engines or more, which take a minute longer for ResNet-50 in training,
    where they save 2 % of the GPU's time; in inference they save 6 %, in a tenth of that.
    """
    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(True)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)


_one_at_a_time = threading.Lock()


@contextmanager
def _kernels_later() -> Iterator[list[Callable[[], None]]]:
    """What inductor would wait for in this thread, as functions that wait for it.

    Kernels go to its pool of processes while that is starting, too: inductor itself compiles its
    first ones by itself then, one after the other.
    """
    from torch._inductor.async_compile import AsyncCompile

    thread, wait = threading.get_ident(), AsyncCompile.wait
    has_pool = vars(AsyncCompile)["use_process_pool"]
    waiting: list[Callable[[], None]] = []

    def later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            waiting.append(functools.partial(wait, self, scope))
        else:
            wait(self, scope)

    def will_have_pool(cls: type[AsyncCompile]) -> bool:
        is_ready: bool = has_pool.__get__(None, cls)()
        is_starting = cls._ready_future is not None  # or there is to be none
        return is_ready or (is_starting and threading.get_ident() == thread)

    with _one_at_a_time:
        AsyncCompile.wait = later  # type: ignore[method-assign]
        AsyncCompile.use_process_pool = classmethod(will_have_pool)  # type: ignore[assignment,method-assign]
        try:
            yield waiting
        finally:
            AsyncCompile.wait = wait  # type: ignore[method-assign]
            AsyncCompile.use_process_pool = has_pool  # type: ignore[method-assign]


@contextmanager
def outside_of_compilation() -> Iterator[None]:
    """Real tensors, and compilations that have nothing to do with the one under way.

    Not in a thread: compiling a backward takes the lock that the compilation under way holds. Nor
    may autograd use its own thread for a GPU, where a backward is compiled when first called.
    """
    from torch._dynamo import utils
    from torch._dynamo.metrics_context import MetricsContext
    from torch._guards import tracing

    outer = utils.get_metrics_context()
    utils._metrics_context_tls.metrics_context = MetricsContext(on_exit=lambda *_: None)
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),
            tracing(None),
            _disable_current_modes(),
        ):
            yield
    finally:
        utils._metrics_context_tls.metrics_context = outer


@contextmanager
def _aside(question: Question) -> Iterator[None]:
    """Outside of the compilation under way, on the GPU that has all tensors of the question."""
    from torch._dynamo.utils import get_metrics_context

    gpu = next(iter(question.gpus), None)
    current = nullcontext() if gpu is None else torch.cuda.device(gpu)
    with outside_of_compilation(), get_metrics_context(), current:
        yield
