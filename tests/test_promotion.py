"""When a shape gets an exact plan: the rule and the estimate behind it, as C++ has them."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import cudnn_ops

ROOT = Path(__file__).parents[1]
CODE = """
#include "graph/promotion.h"
#include "ops/attention/polymorphic_cost.h"

using namespace cudnn_ops;
using graph::MakingTimes;
using graph::Promotion;

extern "C" {
MakingTimes* new_times() { return new MakingTimes(); }
void note(MakingTimes* times, int is_built, double seconds) { times->note(is_built, seconds); }
double build_seconds(MakingTimes* times) { return times->build(); }
double load_seconds(MakingTimes* times) { return times->load(); }
Promotion* new_promotion() { return new Promotion(); }
// 1 and 2 more where it asked whether the plan is stored.
int is_due(Promotion* promotion, double lost, MakingTimes* times, int is_stored) {
  int asked = 0;
  const bool due = promotion->is_due(lost, *times, [&] { asked = 2; return is_stored != 0; });
  return due + asked;
}
int is_due_after(Promotion* promotion, long calls) { return promotion->is_due_after(calls); }
double pairs(long length, long length_kv, long left, long right, int bottom_right) {
  return attended_pairs(length, length_kv, left, right, bottom_right != 0);
}
double lost(int step, double pairs, long batch, long heads, long size, int processors, int sm) {
  return lost_seconds(static_cast<AttentionStep>(step), pairs, batch, heads, size, processors, sm);
}
double copied(long elements) { return copy_seconds(elements); }
}
"""
STEPS = ("fwd, inference", "fwd", "bwd")
#: In csrc/graph/promotion.h.
FEWEST, MOST_BACKOFF = 8, 16


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("promotion")
    (folder / "promotion.cpp").write_text(CODE)
    command = ["c++", "-std=c++20", "-Wall", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run(
        [*command, f"-I{ROOT / 'csrc'}", "promotion.cpp", "-o", "promotion.so"],
        cwd=folder,
        check=True,
    )
    library = ctypes.CDLL(str(folder / "promotion.so"))
    for name in ("build_seconds", "load_seconds", "pairs", "lost", "copied"):
        getattr(library, name).restype = ctypes.c_double
    for name in ("new_times", "new_promotion"):
        getattr(library, name).restype = ctypes.c_void_p
    pointer, real, whole = ctypes.c_void_p, ctypes.c_double, ctypes.c_int
    long = ctypes.c_long
    library.note.argtypes = [pointer, whole, real]
    library.build_seconds.argtypes = library.load_seconds.argtypes = [pointer]
    library.is_due.argtypes = [pointer, real, pointer, whole]
    library.is_due_after.argtypes = [pointer, long]
    library.pairs.argtypes = [long, long, long, long, whole]
    library.copied.argtypes = [long]
    library.lost.argtypes = [whole, real, long, long, long, whole, whole]
    return library


Due = Callable[..., int]


@pytest.fixture
def first_due(cpp: ctypes.CDLL) -> Due:
    """The number of the call at which one shape's plan is due, after those before."""

    def first_due(
        lost: float, promotion: int, build: float = 0.1, load: float = 0.002, is_stored=False
    ) -> int:
        times = cpp.new_times()
        for _ in range(200):
            cpp.note(times, 1, build)
            cpp.note(times, 0, load)
        for call in range(1, 1_000_000):
            if cpp.is_due(promotion, lost, times, is_stored) & 1:
                return call
        raise AssertionError("never")

    return first_due


# --- the rule ---------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "build"), [(1e-4, 0.1), (1e-5, 0.1), (3e-4, 0.05), (1e-3, 0.5)])
def test_a_plan_is_due_when_the_losses_are_its_price(cpp, first_due, lost, build):
    call = first_due(lost, cpp.new_promotion(), build)
    assert call == pytest.approx(build / lost, rel=0.01)


def test_a_stored_plan_is_due_sooner(cpp, first_due):
    call = first_due(2e-5, cpp.new_promotion(), 0.1, 0.002, is_stored=True)
    assert call == pytest.approx(100, abs=2)


def test_the_fewest_calls(cpp, first_due):
    assert first_due(10.0, cpp.new_promotion()) == FEWEST
    assert first_due(10.0, cpp.new_promotion(), is_stored=True) == FEWEST


def test_whether_it_is_stored_is_asked_once(cpp):
    times, promotion = cpp.new_times(), cpp.new_promotion()
    asked = [cpp.is_due(promotion, 5e-4, times, 0) for _ in range(150)]
    assert sum(bool(answer & 2) for answer in asked) == 1
    assert not any(answer & 1 for answer in asked)


def test_a_plan_that_was_dropped_has_to_be_worth_more(cpp, first_due):
    promotion = cpp.new_promotion()
    calls = [first_due(1e-4, promotion) for _ in range(7)]
    for number, call in enumerate(calls):
        assert call == pytest.approx(1000 * min(2**number, MOST_BACKOFF), rel=0.01)


def test_no_more_than_twice_the_best_is_lost(cpp):
    """Whatever number of calls comes: losses and builds, beside the better of the two choices."""
    rng = random.Random(0)
    times = cpp.new_times()
    build = cpp.build_seconds(times)
    for _ in range(50):
        lost = 10 ** rng.uniform(-6, -3)
        calls = int(10 ** rng.uniform(1, 5))
        promotion, paid = cpp.new_promotion(), 0.0
        for _ in range(calls):
            if cpp.is_due(promotion, lost, times, 0) & 1:
                paid += build
                break
            paid += lost
        assert paid <= 2 * min(build, calls * lost) + FEWEST * lost


def test_a_number_of_calls(cpp):
    promotion = cpp.new_promotion()
    assert [cpp.is_due_after(promotion, 3) for _ in range(5)] == [0, 0, 0, 1, 1]


def test_what_plans_take_is_learned_within_bounds(cpp):
    times = cpp.new_times()
    for _ in range(50):
        cpp.note(times, 1, 0.4)
        cpp.note(times, 0, 0.004)
    assert cpp.build_seconds(times) == pytest.approx(0.4, rel=1e-3)
    assert cpp.load_seconds(times) == pytest.approx(0.004, rel=1e-3)
    cpp.note(times, 1, 1e9)  # a machine that slept
    assert cpp.build_seconds(times) < 1
    for _ in range(50):
        cpp.note(times, 1, 0.0)
        cpp.note(times, 0, 0.0)
    assert cpp.build_seconds(times) > 0.005
    assert cpp.load_seconds(times) > 0.0002


# --- the estimate -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_pairs(cpp, seed):
    rng = random.Random(seed)
    length, length_kv = rng.randint(1, 700), rng.randint(1, 700)
    left, right = (rng.choice([-1, rng.randint(0, 400)]) for _ in range(2))
    bottom_right = rng.random() < 0.5
    shift = length_kv - length if bottom_right else 0
    exact = 0
    for i in range(length):
        first = 0 if left < 0 else max(0, i + shift - left)
        last = length_kv if right < 0 else min(length_kv, i + shift + right + 1)
        exact += max(0, last - first)
    found = cpp.pairs(length, length_kv, left, right, bottom_right)
    assert found == pytest.approx(exact, rel=0.1, abs=0.01 * length * length_kv + length)


def measured() -> list[tuple[str, float]]:
    """What polymorphic plans lost on an H200, in seconds."""
    rows = json.loads((ROOT / "benchmarks/results/h200/shape_churn.json").read_text())["rows"]
    ms = {(r["case"], r["impl"]): r["value"] for r in rows if r["metric"] == "gpu_ms"}
    cases = dict.fromkeys(case for case, _ in ms)
    return [(c, (ms[c, "polymorphic"] - ms[c, "exact"]) / 1e3) for c in cases]


@pytest.mark.parametrize(("case", "seconds"), measured())
def test_the_estimate_is_what_was_measured(cpp, case, seconds):
    sizes, mask, step = case.split(maxsplit=2)
    batch, heads, _, length, size = map(int, sizes.split(","))
    pairs = cpp.pairs(length, length, -1, 0 if mask == "causal" else -1, 0)
    found = cpp.lost(STEPS.index(step), pairs, batch, heads, size, 132, 90)
    assert 0.5 * seconds < found < 2 * seconds


def test_copies_take_their_launch_and_their_bytes(cpp):
    assert cpp.copied(64) == pytest.approx(5e-6, rel=0.01)
    assert cpp.copied(1 << 26) == pytest.approx(140e-6, rel=0.1)


def test_a_slower_gpu_loses_more(cpp):
    pairs = cpp.pairs(4096, 4096, -1, 0, 0)
    lost = [cpp.lost(1, pairs, 4, 32, 128, *gpu) for gpu in ((148, 100), (132, 90), (108, 80))]
    assert lost == sorted(lost)


# --- the setting ------------------------------------------------------------------------


def test_the_default_and_a_count():
    time = cudnn_ops._C.promote_after()
    assert time == -1
    with cudnn_ops.using_plan_policy("auto", promote_after=3):
        assert cudnn_ops._C.promote_after() == 3
        with cudnn_ops.using_plan_policy("exact", promote_after="time"):
            assert cudnn_ops._C.promote_after() == time
        assert cudnn_ops._C.promote_after() == 3
    assert cudnn_ops._C.promote_after() == time


@pytest.mark.parametrize("wrong", [-1, "often", ""])
def test_mistakes(wrong):
    with pytest.raises(ValueError, match=r'must be "time" or a number of calls, at least 0'):
        cudnn_ops.set_plan_policy("auto", promote_after=wrong)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_cache")
def test_losses_promote_a_shape():
    import torch

    def attend(length: int) -> None:
        q = torch.ones(4, length, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        cudnn_ops.scaled_dot_product_attention(q, q, q, is_causal=True)

    attend(4096)
    for _ in range(100):
        attend(1024)
    assert cudnn_ops.cache_info().builds == 2  # an exact one, and one for other lengths
    for _ in range(200_000):  # each loses more than 15 µs, and plans take less than 2 s
        attend(1024)
        if cudnn_ops.cache_info().pending:
            break
    cudnn_ops.wait_for_plans()
    info = cudnn_ops.cache_info()
    assert (info.builds, info.background, info.failed) == (3, 1, 0)
    with cudnn_ops.record_shapes() as shapes:
        attend(1024)
    assert ["1024" in str(shape) for shape in shapes] == [True]
