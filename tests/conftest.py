"""What all tests share: the devices, fresh plan caches, poisoned memory."""

from __future__ import annotations

import atexit
import fcntl
import gc
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Literal

# Before the import: no test reads or writes the user's own store.
os.environ["CUDNN_OPS_CACHE_DIR"] = ""
# Nor torch's: a graph that was compiled over another version of our fake kernels is out of date,
# and torch cannot know.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="cudnn_ops-tests-")

# Tensors are small here, and processes many: threads that spin for each other take each other's
# cores, and what takes a second takes ten. The processes that tests start have this too.
os.environ["OMP_NUM_THREADS"] = "1"

# Of several GPUs, as benchmarks/gpu_suite.py names them, each of several processes has one.
if "PYTEST_XDIST_WORKER" in os.environ and os.environ.get("CUDNN_OPS_TEST_GPUS"):
    _GPUS = os.environ["CUDNN_OPS_TEST_GPUS"].split(",")
    _WORKER = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = _GPUS[_WORKER % len(_GPUS)]

import pytest
import torch

import cudnn_ops
from cudnn_ops.ops.activation import ACTIVATIONS, Activation
from cudnn_ops.ops.linear import LINEAR_STEPS
from cudnn_ops.plans import packaged
from cudnn_ops.plans.tables import LinearTiming

atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# Tests that count builds want none of the package's plans, where there are some.
packaged.FOLDER = Path("/nowhere")

#: Tests that take minutes begin before all others: no process is to be left with one at the end.
LONG = (
    *("test_export.py", "test_sdpa_features_random.py"),
    *("test_serving_ranks.py", "test_ring.py", "test_sharding.py"),
    # On a GPU:
    *("test_norm_choice.py", "test_linear_choice.py", "test_nn_moe.py", "test_generation.py"),
    *("test_varlen.py", "test_sdpa_random.py", "test_conv_random.py"),
)
#: How many seconds a test takes, by its function, where it takes several.
SECONDS: dict[str, int] = json.loads(Path(__file__).with_name("seconds.json").read_text())
#: A time, in seconds since 1970, after which none of those begins; they are last then. For CI,
#: which has 90 minutes on a machine that may be slow.
UNTIL = int(os.environ.get("CUDNN_OPS_TEST_UNTIL", 0))


def seconds_of(item: pytest.Item) -> int:
    return SECONDS.get(item.nodeid.partition("[")[0], 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if UNTIL:
        # What takes a few seconds before what takes minutes, and plans for the GPU that numbers
        # are measured on before those for others.
        items.sort(key=lambda item: (is_for_another_gpu(item), seconds_of(item)))
        return
    items.sort(key=lambda item: item.path.name not in LONG)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A process is given two tests at first, of which one at most is to take minutes.
        long = [item for item in items if item.path.name in LONG]
        others = items[len(long) :]
        pairs = itertools.chain.from_iterable(zip(long, others, strict=False))
        items[:] = [*pairs, *long[len(others) :], *others[len(long) :]]


class FailuresAtOnce:
    """Names each test that fails when it does: a run that is cut off prints no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            why = report.longreprtext.rpartition("\n")[2]
            self.reporter.write_line(f"\nfailed: {report.nodeid} {why}")


@pytest.hookimpl(trylast=True)  # behind the reporter's own
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # of several processes the first one has it
        config.pluginmanager.register(FailuresAtOnce(reporter))


def is_for_another_gpu(item: pytest.Item) -> bool:
    return seconds_of(item) > 0 and any(gpu in item.name for gpu in ("a100", "b200"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if UNTIL and time.time() > UNTIL and seconds_of(item):
        pytest.skip("no time was left for what takes long")


#: Parametrize with this: the CPU everywhere, the GPU with ``-m gpu``. Asking for the GPU where
#: there is none is an error of the run, not a skip.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


#: Bytes that a process may keep from one test to the next: a GPU has as many processes as a CPU has
#: cores, and 80 GB.
KEPT_MEMORY = 1 << 30


def give_memory_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_MEMORY:
        give_memory_back()


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside it torch uses deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_cache():
    """An empty plan cache with its counters at zero; the limit is put back afterwards."""
    limit = cudnn_ops.cache_info().limit
    cudnn_ops.cache_clear()
    yield
    cudnn_ops.set_cache_limit(limit)
    cudnn_ops.cache_clear()


@pytest.fixture
def without_our_decoding():
    """Plans of cuDNN decode over pages of 16 bits, where our kernel is faster too."""
    torch.ops.cudnn_ops._paged_use_kernel(1)
    yield
    torch.ops.cudnn_ops._paged_use_kernel(0)


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """How engines make their steps that are not told: one by one, and overlapped."""
    from cudnn_ops.generation import Engine

    defaults = Engine.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "overlap", request.param)
    return bool(request.param)


@pytest.fixture
def engine_table(fresh_cache):
    """Names an engine for plans that are to be built; the package's tables are put back afterwards.

    ``cudnn``: the version that the table is for, None for the one that is there.
    """

    def set_table(
        requests: list[cudnn_ops.PlanRequest],
        engine: str,
        cudnn: int | None = None,
        sm: int = 90,
    ) -> None:
        cudnn_ops.cache_clear()
        cudnn = cudnn_ops._C.cudnn_version() if cudnn is None else cudnn
        table = [(request.words, engine) for request in requests]
        cudnn_ops._C.set_engine_table(sm, cudnn, table)

    yield set_table
    for sm in (80, 90):
        cudnn_ops._C.set_engine_table(sm, 0, [])
    cudnn_ops.plans.tables.load_tables()


@pytest.fixture
def linear_table():
    """Names the engine of all steps of linear layers; the package's tables are put back afterwards.

    None: nothing was measured. Steps by their names have another engine. Where there is no GPU it
    is for one of compute capability 9.0, or of ``sm``.
    """
    here = 90
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        here = 10 * major + minor

    # A graph runs only near a size that was measured: these are near every size.
    sizes = [round(3.5**power) for power in range(9)]

    def set_table(
        engine: str | None, plan_engine: str = "", *, sm: int = here, **others: str
    ) -> None:
        rows = []
        near = sizes if engine == "graph" else sizes[:1]
        kinds: tuple[Activation | Literal["slope"], ...] = (*ACTIVATIONS, "slope")
        for step, activation, m, n, k in product(LINEAR_STEPS, kinds, near, near, near):
            # Beside a graph, a kernel of ours runs what has no plan.
            timing = LinearTiming(step, activation, m, n, k, {"ours": 0.0}, plan_engine)
            rows.append(timing.as_choice(others.get(step, engine)))
        version = cudnn_ops._C.cudnn_version()
        cudnn_ops._C.set_linear_table(sm, version, rows if engine else [])

    yield set_table
    for each in {80, 90, here}:
        cudnn_ops._C.set_linear_table(each, 0, [])
    cudnn_ops.plans.tables.load_tables()


@pytest.fixture
def store(tmp_path):
    """A store of its own, in a folder that is not there yet."""
    folder = tmp_path / "deep" / "store"
    cudnn_ops.set_store(folder)
    yield folder
    cudnn_ops.set_store(None)


@pytest.fixture
def poisoned(request):
    """Fresh memory is full of NaN: what a kernel leaves unwritten shows."""
    if request.node.callspec.params["device"] == "cpu":
        # torch fills what torch.empty gives under deterministic algorithms.
        with deterministic():
            yield
        return
    # Blocks that the allocator hands out again: more than any case takes, all NaN.
    torch.cuda.empty_cache()
    blocks = [torch.full((n,), torch.nan, device="cuda") for n in (128, 1 << 14, 1 << 18) * 48]
    blocks.append(torch.full((1 << 26,), torch.nan, device="cuda"))
    del blocks
    yield


@pytest.fixture
def much_memory():
    """Of the tests that take a large share of a GPU's memory one at a time, in all processes.

    A test says how many GiB it takes; it is skipped where they are not free for a while.
    """

    def require(gib: int) -> None:
        give_memory_back()
        end = time.monotonic() + 15
        while (free := torch.cuda.mem_get_info()[0]) < gib << 30:
            if time.monotonic() > end:
                pytest.skip(f"needs {gib} GiB, and {free >> 30} are free")
            time.sleep(0.2)

    with open(Path(tempfile.gettempdir()) / "cudnn_ops-tests-much-memory", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield require
        give_memory_back()


@pytest.fixture
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of float32 by float32: torch itself takes TF32 at some shapes only."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def without_vmap_fallback():
    """Torch's loop over samples, which it takes for operators without a rule, raises."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)
