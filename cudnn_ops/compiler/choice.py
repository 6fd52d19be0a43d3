"""Whether a match is swapped: what was asked for, or what was measured on this GPU.

Both candidates, inductor's code for the stock subgraph and for the replacement, run on tensors of
the shapes, dtypes and strides that the graph has, forward and, where gradients are needed,
backward. What decides is the GPU's time and the host's: small models, and large ones on slow
processors, wait for the host. The answer is kept beside the stored plans, so that it is measured
once for each GPU and version.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for
from torch.utils._python_dispatch import _disable_current_modes

from cudnn_ops import _C
from cudnn_ops.compiler.memory_order import CONVOLUTIONS
from cudnn_ops.compiler.nodes import (
    call_of,
    has_static_sizes,
    memory_given_to,
    memory_of_result,
    value_of,
)
from cudnn_ops.compiler.options import Settings
from cudnn_ops.compiler.pattern import Found, Pattern
from cudnn_ops.compiler.report import Candidate, CompileReport
from cudnn_ops.compiler.trial import trial_of
from cudnn_ops.plans import timing
from cudnn_ops.plans.cache import store_info
from cudnn_ops.plans.files import replacing
from cudnn_ops.plans.policy import Policy, using_plan_policy

#: Ours must take less than this share of inductor's time: it also ends fusions around it.
WORTHWHILE = 0.97
#: Up to this share of it, the GPU takes as long as for inductor's.
AS_LONG = 1.01
_ROUNDS = 10
_FILE = "compile_choices.json"
#: A compiled graph is called often, with these shapes: it gets the plans of shapes that are.
_POLICY: Policy = "exact"

Clock = Callable[[dict[str, Callable[[], object]]], dict[str, float]]


class Times(NamedTuple):
    """Milliseconds of the GPU and of the host: ours, and what inductor makes of the stock graph."""

    ours: float
    stock: float
    ours_host: float = 0.0
    stock_host: float = 0.0

    def verdict(self) -> tuple[bool, str]:
        """Whether ours is better, and why it is or is not where the GPU's time does not say."""
        if self.ours < WORTHWHILE * self.stock:
            if self.ours_host - self.stock_host < self.stock - self.ours:
                return True, ""
            return False, "it takes more of the host's time than it saves of the GPU's"
        if self.ours <= AS_LONG * self.stock and self.ours_host < WORTHWHILE * self.stock_host:
            return True, "as fast, in less of the host's time"
        return False, "not faster here"


class Chooser:
    """Decides for the graphs of one compilation; remembers what it has measured."""

    def __init__(
        self, settings: Settings, report: CompileReport, clock: Clock | None = None
    ) -> None:
        """``clock``, for tests, measures anywhere, and no time of the host's."""
        self.settings, self.report = settings, report
        self._clock = clock or functools.partial(timing.gpu_ms, rounds=_ROUNDS)
        self._measures_anywhere = clock is not None

    def __call__(self, pattern: Pattern, found: Found, candidate: Candidate) -> bool:
        """Whether to swap; the candidate gets the reason and the times."""
        settings = self.settings
        if settings.swap is not None:
            if pattern.name not in settings.swap:
                candidate.reason = "not among options['swap']"
                return False
            if found.only_measured:
                candidate.reason = "not measured"
                return False
            candidate.reason = "dry run" if settings.dry_run else "asked for by options['swap']"
            return not settings.dry_run
        if reason := self._unmeasurable(found) or found.only_asked:
            candidate.reason = reason
            return False
        key = key_of(pattern, found)
        times = self._known.get(key)
        if times is None:
            if settings.dry_run:
                candidate.reason = "dry run: not measured yet"
                return False
            times = self._known[key] = self._measure(pattern, found)
            _remember(key, times)
        candidate.ours_ms, candidate.stock_ms = times.ours, times.stock
        is_faster, candidate.reason = times.verdict()
        if settings.dry_run:
            candidate.reason = "dry run" + (f": {candidate.reason}" if candidate.reason else "")
        return is_faster and not settings.dry_run

    @functools.cached_property
    def _known(self) -> dict[str, Times]:
        """What was measured before, in this process or in others; read once for all candidates."""
        return {**_in_memory, **_stored(_path())}

    def _unmeasurable(self, found: Found) -> str:
        values = [value_of(node) for node in found.inputs]
        tensors = [value for value in values if value is not None]
        devices = {value.device.type for value in tensors}
        if devices != {"cuda"} and not self._measures_anywhere:
            return "its tensors are not on a GPU"
        if devices == {"cuda"} and torch.cuda.get_device_capability(tensors[0].device) < (8, 0):
            return "the GPU has a compute capability below 8.0"
        if not all(map(has_static_sizes, tensors)):
            return "a size is dynamic, and times differ from size to size"
        return ""

    def _measure(self, pattern: Pattern, found: Found) -> Times:
        trial = trial_of(found)
        values = [value_of(node) for node in trial.inputs]
        devices = {value.device for value in values if value is not None and value.is_cuda}
        # Named, or torch would warn of a machine with several GPUs.
        rng = torch.random.fork_rng(devices=[device.index or 0 for device in devices])
        with rng, _outside_of_compilation(), _current(devices), using_plan_policy(_POLICY):
            inputs = [_random_like(node, pattern) for node in trial.inputs]
            more = ()
            if trial.beforehand is not None:
                with torch.no_grad():
                    more = fx.GraphModule({}, trial.beforehand)(*inputs)
            steps = {
                "ours": _compiled_step(fx.GraphModule({}, trial.ours), [*inputs, *more]),
                "stock": _compiled_step(fx.GraphModule({}, trial.stock), inputs),
            }
            gpu, host = self._clock(steps), dict.fromkeys(steps, 0.0)
            if not self._measures_anywhere:
                host = timing.host_ms(steps, rounds=_ROUNDS)
        return Times(gpu["ours"], gpu["stock"], host["ours"], host["stock"])


def key_of(pattern: Pattern, found: Found) -> str:
    """What the times depend on: the computation, its tensors, the GPU and the versions."""
    trial = trial_of(found)
    values = [value_of(node) for node in trial.inputs]
    tensors = [
        (str(v.dtype), tuple(v.shape), _strides_of(node, pattern), v.requires_grad)
        if (v := value_of(node)) is not None
        else None
        for node in trial.inputs
    ]
    device = next((v.device for v in values if v is not None), torch.device("cpu"))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    # Not of modules, whose making compiles them.
    computations = tuple(graph.python_code("self").src for graph in (trial.ours, trial.stock))
    facts = (
        *(pattern.name, computations, tensors, torch.is_grad_enabled(), where),
        *(torch.__version__, _C.cudnn_version(), _C.versions()["graphs"], _POLICY),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _compiled_step(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[], object]:
    """One call of what inductor makes of a graph, and its gradients where there are any."""
    from torch._dynamo.utils import get_metrics_context
    from torch._inductor.compile_fx import compile_fx

    with get_metrics_context():
        function: Any = compile_fx(module, list(inputs))
        leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        grads = [torch.randn_like(x) if x.requires_grad else None for x in function(*inputs)]

        def step() -> object:
            results = function(*inputs)
            roots = [x for x, grad in zip(results, grads, strict=True) if grad is not None]
            if not leaves or not roots:
                return results
            along = [grad for grad in grads if grad is not None]
            return torch.autograd.grad(roots, leaves, along, allow_unused=True)

        step()  # the backward is compiled when it is first called
    return step


def _random_like(node: fx.Node, pattern: Pattern) -> Any:
    value = value_of(node)
    if value is None:
        return None
    if value.is_floating_point():
        result = torch.empty_strided(
            value.shape, _strides_of(node, pattern), dtype=value.dtype, device=value.device
        ).normal_()
    else:
        result = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    return result.requires_grad_(value.requires_grad and torch.is_grad_enabled())


def _strides_of(node: fx.Node, pattern: Pattern) -> tuple[int, ...]:
    """Those that it has when the graph runs: between convolutions images are channels last.

    Inductor lays them out so, whatever the model's memory is, and so do our operators. What reads
    such images as rows of channels, with the channels permuted to the end, finds rows then.
    """
    value = value_of(node)
    assert value is not None
    if value.dim() in (4, 5) and _is_computed(node):
        call = call_of(node)
        if pattern.of_images or (call is not None and call.name in CONVOLUTIONS):
            return make_channels_last_strides_for(value.shape)
        if value.movedim(-1, 1).is_contiguous():
            return make_contiguous_strides_for(value.shape)
    return value.stride()


def _is_computed(node: fx.Node) -> bool:
    """Whether it is memory of the graph's own, and no view of what the graph was given."""
    return memory_of_result(node).isdisjoint(memory_given_to(node.graph))


@contextmanager
def _outside_of_compilation() -> Iterator[None]:
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


def _current(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """All tensors of a graph that is measured are on one GPU."""
    device = next(iter(devices), None)
    return nullcontext() if device is None else torch.cuda.device(device)


def _path() -> Path | None:
    info = store_info()
    return Path(info.folder) / _FILE if info.folder and not info.refusal else None


#: Where there is no store.
_in_memory: dict[str, Times] = {}


def _stored(path: Path | None) -> dict[str, Times]:
    """What the file has: nothing where it is missing or damaged."""
    try:
        content = {} if path is None else json.loads(path.read_text())
        return {key: Times(*map(float, times)) for key, times in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(key: str, times: Times) -> None:
    _in_memory[key] = times
    path = _path()
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Other processes may have added theirs since this one read it.
        with replacing(path) as file:
            file.write(json.dumps({**_stored(path), key: times}).encode())
    except OSError:
        return  # as the store of plans: what cannot be kept is measured again
