"""Plans that are made in the background, by operators as they are: see fake_cudnn.py.

A plan that is held is not finished before the test says so: what a call does meanwhile, it does
without that plan, however long builds take here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch

from tests.deviceless.fake_cudnn import build_fakes, run_program

#: Heads and lengths that lose milliseconds a call on a polymorphic plan. `promote` calls until a
#: plan is being made, and holds that one; `general` is the polymorphic plan.
PROMOTE = """
def big(length):
    sizes = (32, length, 64, 128)
    x = torch.empty(sizes, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    cudnn_ops.scaled_dot_product_attention(x, x, x, is_causal=True)
    return cudnn.fake_executed_here()

def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)

def promote(*lengths, most=1000):
    cudnn.fake_hold(1)
    for count, length in enumerate(lengths, start=1):
        for _ in range(most):
            assert big(length) == general
            if cudnn_ops.cache_info().pending == count:
                break
    assert cudnn_ops.cache_info().pending == len(lengths)
    wait_until(lambda: cudnn.fake_held() == 1)

def release_soon():
    def release():
        time.sleep(0.3)
        cudnn.fake_hold(0)
    threading.Thread(target=release, daemon=True).start()

def give_up(*error):  # with nothing held, or the process would not end
    cudnn.fake_hold(0)
    sys.__excepthook__(*error)

sys.excepthook = give_up
first = big(8192)
general = big(8000)
assert general != first
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


# A torch without CUDA has no operators that run by plans.
@pytest.fixture(scope="module", params=["cuda"] if torch.version.cuda else [])
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    preload = build_fakes(tmp_path_factory.mktemp("fakes"))

    def run(program: str, *options: str, code: int = 0, **variables: str):
        done = run_program(preload, PROMOTE + program, *options, **variables)
        assert done.returncode == code, done.stderr[-3000:]
        return done

    return run


def test_the_call_that_promotes_builds_nothing(run):
    run("""
built = cudnn.fake_finalized_here()
promote(8000)
for _ in range(100):
    assert big(8000) == general
info = cudnn_ops.cache_info()
assert (info.builds, info.background, info.pending, info.failed) == (2, 0, 1, 0), info
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
own = big(8000)
assert own not in (first, general)
assert all(big(8000) == own for _ in range(20))
assert big(8001) == general
assert cudnn.fake_finalized_here() == built == cudnn.fake_finalized() - 1
info = cudnn_ops.cache_info()
assert (info.builds, info.background, info.pending, info.failed) == (3, 1, 0, 0), info
""")


def test_the_backward_too(run):
    run("""
def step(length):
    x = torch.empty(32, length, 64, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    x.requires_grad_()
    out = cudnn_ops.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.autograd.grad(out, x, out)

step(8192)
for _ in range(500):
    step(8000)
    cudnn_ops.wait_for_plans()
    if cudnn_ops.cache_info().background == 2:
        break
info = cudnn_ops.cache_info()
assert (info.background, info.pending, info.failed) == (2, 0, 0), info
with cudnn_ops.record_shapes() as shapes:
    step(8000)
assert [shape.op for shape in shapes] == ["sdpa", "sdpa_backward"]
assert all("8000" in str(shape) for shape in shapes), shapes
os._exit(0)  # torch's own threads do not end without a GPU
""")


def test_a_number_of_calls_builds_in_the_call(run):
    run("""
with cudnn_ops.using_plan_policy("auto", promote_after=3):
    assert [big(7950) == general for _ in range(3)] == [True] * 3
    built = cudnn.fake_finalized_here()
    own = big(7950)
    assert own != general
    assert cudnn.fake_finalized_here() == built + 1
info = cudnn_ops.cache_info()
assert (info.background, info.pending) == (0, 0)
""")


def test_deterministic_algorithms_keep_the_plan(run):
    """Time would change results by rounding, and not at the same call in each run."""
    run("""
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = False
assert all(big(8000) == general for _ in range(2000))
info = cudnn_ops.cache_info()
assert (info.builds, info.pending) == (2, 0), info
cudnn_ops.set_plan_policy("auto", promote_after=2)
built = cudnn.fake_finalized_here()
assert [big(7950) == general for _ in range(4)] == [True, True, False, False]
assert cudnn.fake_finalized_here() == built + 1
""")


def test_engines_are_measured_in_the_call(run):
    run("""
cudnn_ops.set_autotune(True)
built = cudnn.fake_finalized_here()
for _ in range(500):
    if big(8000) != general:
        break
assert big(8000) != general
assert cudnn.fake_finalized_here() > built
info = cudnn_ops.cache_info()
assert (info.background, info.pending, info.builds) == (0, 0, 3), info
""")


#: By kernels of this package at first, and by a plan when they are called often.
OFTEN = """
x = torch.empty(1 << 14, 4096, dtype=torch.bfloat16, device="cuda")
weight = torch.empty(4096, dtype=torch.bfloat16, device="cuda")
image = torch.empty(64, 64, 56, 56, dtype=torch.bfloat16, device="cuda")
image = image.to(memory_format=torch.channels_last)
# The package's table may be of another cuDNN.
row = (0, True, 8192, 1 << 14, True, "")
_C.set_norm_table(90, _C.cudnn_version(), [row])

def call(times):
    before = cudnn.fake_executed()
    for _ in range(times):
        cudnn_ops.layer_norm(x, (4096,), weight, weight)
        cudnn_ops.batch_norm(image, None, None, training=True)
    return cudnn.fake_executed() - before
"""


def test_norms_that_are_called_often(run):
    run(
        OFTEN
        + """
built = cudnn.fake_finalized_here()
cudnn.fake_hold(1)
assert call(256) == 0
assert cudnn_ops.cache_info().pending == 0
assert call(100) == 0
assert cudnn_ops.cache_info().pending == 2
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
assert call(10) == 20
info = cudnn_ops.cache_info()
assert (info.background, info.pending, info.failed) == (2, 0, 0), info
assert cudnn.fake_finalized_here() == built
"""
    )


def test_norms_that_are_called_often_by_a_number_of_calls(run):
    run(
        OFTEN
        + """
cudnn_ops.set_plan_policy("auto", promote_after=5)
built = cudnn.fake_finalized_here()
assert call(5) == 0
assert call(1) == 2
assert cudnn.fake_finalized_here() >= built + 2
info = cudnn_ops.cache_info()
assert (info.builds, info.background, info.pending) == (4, 0, 0), info
"""
    )


def test_many_threads_have_one_plan_made(run):
    run("""
LENGTHS = (8000, 7900, 7800)
barrier = threading.Barrier(9)
wrong, last = [], []

def work(number):
    try:
        barrier.wait()
        for _ in range(400):
            for length in LENGTHS[number % 3 :] + LENGTHS[: number % 3]:
                if big(length) == first:
                    wrong.append(length)
        barrier.wait()
        barrier.wait()
        last.append(tuple(big(length) for length in LENGTHS))
    except BaseException as error:
        wrong.append(error)
        barrier.abort()

threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for thread in threads:
    thread.start()
barrier.wait()
barrier.wait()
cudnn_ops.wait_for_plans()
barrier.wait()
for thread in threads:
    thread.join()
assert not wrong, wrong
assert len(set(last)) == 1 and len({first, general, *last[0]}) == 5, last
info = cudnn_ops.cache_info()
assert (info.builds, info.background, info.pending, info.failed) == (5, 3, 0, 0), info
assert cudnn.fake_finalized() == 5
""")


@pytest.mark.parametrize("filter", ["always", "error"])
def test_a_failure_reaches_no_call(run, filter):
    """It is told once and not tried again; where warnings are errors, they are nobody's here."""
    done = run(
        """
cudnn.fake_fail(1)
promote(8000, 7900)
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
info = cudnn_ops.cache_info()
assert (info.builds, info.background, info.pending, info.failed) == (2, 0, 0, 2), info
cudnn.fake_fail(0)
assert all(big(8000) == general for _ in range(2000))
cudnn_ops.wait_for_plans()
info = cudnn_ops.cache_info()
assert (info.background, info.failed) == (0, 2), info
cudnn_ops.cache_clear()
assert cudnn_ops.cache_info().failed == 0
big(8192)
general = big(8000)
promote(8000)
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
assert cudnn_ops.cache_info().background == 1 and big(8000) != general
""",
        *("-W", filter),
    )
    told = done.stderr.count("could not be made in the background")
    assert told == (filter == "always"), done.stderr


def test_a_refusal_is_no_mistake(run):
    done = run(
        """
rule = {"id": "x", "plan": "sdpa", "cudnn": (0, 999999), "sm": (80, 200), "reason": "be long"}
_C.set_known_bad([rule | {"when": [("query.size2", "==", 8000)]}])
for _ in range(2000):
    assert big(8000) == general
cudnn_ops.wait_for_plans()
for _ in range(2000):
    assert big(8000) == general
cudnn_ops.wait_for_plans()
info = cudnn_ops.cache_info()
assert (info.background, info.failed) == (0, 1), info
promote(7900)
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
assert big(7900) != general
""",
        *("-W", "always"),
    )
    assert "background" not in done.stderr


def test_what_is_stored_is_read_in_the_background(run, tmp_path):
    store = {"CUDNN_OPS_CACHE_DIR": str(tmp_path / "store")}
    run("promote(8000); cudnn.fake_hold(0); cudnn_ops.wait_for_plans()", **store)
    run(
        """
calls = 0
while not cudnn_ops.cache_info().background:
    cudnn_ops.wait_for_plans()
    assert cudnn_ops.cache_info().background or big(8000) == general
    calls += 1
assert 8 <= calls < 20  # long before it is worth a build
assert big(8000) != general
info = cudnn_ops.cache_info()
assert (info.builds, info.loads, info.background) == (0, 3, 1), info
""",
        **store,
    )


def test_clearing_the_cache_forgets_what_is_on_its_way(run):
    run("""
promote(8000, 7900)
cudnn_ops.cache_clear()
assert cudnn_ops.cache_info().pending == 1  # it is being made, and will not be kept
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
info = cudnn_ops.cache_info()
assert (info.builds, info.size, info.background, info.pending, info.failed) == (0,) * 5, info
first = big(8192)
general = big(8000)
promote(8000)
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
assert big(8000) not in (first, general)
""")


def test_a_plan_that_a_call_needs_is_not_built_twice(run):
    """It waits for the thread that builds it."""
    run("""
promote(8000)
with cudnn_ops.using_plan_policy("exact"):
    release_soon()
    own = big(8000)
assert own != general
cudnn_ops.wait_for_plans()
assert big(8000) == own
assert cudnn.fake_finalized() == 3
""")


def test_another_thread_may_capture_a_cuda_graph_meanwhile(run):
    run("""
runtime.fake_capture(1)
assert cudnn.fake_forbidden() == 0
promote(8000)
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
assert cudnn_ops.cache_info().background == 1
assert cudnn.fake_forbidden() == 0
""")


# --- the end of the process ----------------------------------------------------------------

ENDS = {
    "of the program": ("", 0),
    "by sys.exit": ("sys.exit(3)", 3),
    "by an exception": ("raise SystemExit(4)", 4),
    "of C": ("ctypes.CDLL(None).exit(5)", 5),
    "at once": ("os._exit(6)", 6),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "free"])
def test_the_process_ends_while_a_plan_is_made(run, end, is_held):
    statement, code = ENDS[end]
    free = "" if is_held else "cudnn.fake_hold(0)"
    done = run(f"promote(8000, 7900, 7800); {free}\nrelease_soon()\n{statement}", code=code)
    assert not done.stderr


@pytest.mark.parametrize("filter", ["always", "error"])
def test_a_plan_fails_while_the_process_ends(run, filter):
    done = run("promote(8000)\ncudnn.fake_fail(1)\nrelease_soon()", *("-W", filter))
    assert ("could not be made in the background" in done.stderr) == (filter == "always")


def test_only_the_plan_that_is_made_is_waited_for(run):
    done = run("""
promote(8000, 7900, 7800)
release_soon()
built = cudnn.fake_finalized()
_C.stop_background()
print(cudnn.fake_finalized() - built, cudnn_ops.cache_info().pending)
for _ in range(2000):
    assert big(7700) == general
print(cudnn_ops.cache_info().pending)
""")
    assert done.stdout.split() == ["1", "0", "0"]


def test_a_fork_while_a_plan_is_made(run):
    """The child has no such thread, waits for none, and may start its own."""
    run("""
request = cudnn_ops.plan_requests(
    "sdpa", ((1, 2, 64, 64), torch.bfloat16), training=False, plans="exact"
)[0]
promote(8000, 7900)
child = os.fork()
if child == 0:
    assert cudnn_ops.cache_info()[6:] == (0, 0, 0)
    cudnn_ops.wait_for_plans()
    cudnn.fake_hold(0)
    x = torch.ones(1, 1, 4, 8)
    assert cudnn_ops.scaled_dot_product_attention(x, x, x).sum() == 32
    _C.make_plan_in_background(request.words, "current")
    cudnn_ops.wait_for_plans()
    assert cudnn_ops.cache_info()[6:] == (1, 0, 0)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert cudnn_ops.cache_info()[6:] == (0, 2, 0)
cudnn.fake_hold(0)
cudnn_ops.wait_for_plans()
assert cudnn_ops.cache_info()[6:] == (2, 0, 0)
assert big(8000) != general
""")
