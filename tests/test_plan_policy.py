"""Exact and polymorphic plans: the same results, and which is taken when."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import cudnn_ops
from cudnn_ops.support import explain
from tests.cases import sdpa as cases
from tests.cases.sdpa import Case, run
from tests.conftest import deterministic
from tests.test_sdpa_random import LAYOUTS

pytestmark = pytest.mark.usefixtures("fresh_cache")

CASE = Case(2, 4, 2, 96, 96, 64, 64, is_causal=True)


def attend(length: int, batch: int = 2, **changes) -> torch.Tensor:
    case = replace(CASE, batch=batch, length=length, length_kv=length, **changes)
    return torch.ops.cudnn_ops.sdpa(
        *cases.make_inputs(case, torch.bfloat16, "cuda"), **case.kwargs()
    )


def plans_asked_for(function) -> list[str]:
    with cudnn_ops.record_shapes() as shapes:
        function()
    return ["polymorphic" if "sequences=2" in str(shape) else "exact" for shape in shapes]


# --- settings ---------------------------------------------------------------------------


def test_the_setter_and_the_context():
    assert cudnn_ops.plan_policy() == "auto"
    with cudnn_ops.using_plan_policy("exact"):
        assert cudnn_ops.plan_policy() == "exact"
        with suppress(KeyError), cudnn_ops.using_plan_policy("polymorphic"):
            assert cudnn_ops.plan_policy() == "polymorphic"
            raise KeyError
        assert cudnn_ops.plan_policy() == "exact"
        seen = []
        thread = threading.Thread(target=lambda: seen.append(cudnn_ops.plan_policy()))
        thread.start()
        thread.join()
        assert seen == ["exact"]  # autograd's threads are others
    assert cudnn_ops.plan_policy() == "auto"


@pytest.mark.parametrize("policy", ["", "Exact", "heuristic", None])
def test_unknown_policies_are_refused(policy):
    with pytest.raises(ValueError, match="one of auto, exact, polymorphic"):
        cudnn_ops.set_plan_policy(policy)
    with pytest.raises(ValueError, match="number of calls"):
        cudnn_ops.set_plan_policy("auto", promote_after=-1)
    assert cudnn_ops.plan_policy() == "auto"


@pytest.mark.parametrize(
    ("variables", "prints"),
    [
        ({"CUDNN_OPS_PLAN_POLICY": "polymorphic"}, "polymorphic 0"),
        ({"CUDNN_OPS_AUTOTUNE": "1"}, "auto 1"),
        ({"CUDNN_OPS_PLAN_POLICY": "fast"}, "one of auto, exact, polymorphic, got 'fast'"),
        ({"CUDNN_OPS_AUTOTUNE": "yes"}, "CUDNN_OPS_AUTOTUNE is 0 or 1, got 'yes'"),
    ],
)
def test_the_environment(variables, prints):
    code = "import cudnn_ops; print(cudnn_ops.plan_policy(), cudnn_ops._C.autotune())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables
    )
    assert prints in done.stdout + done.stderr


# --- polymorphic plans, without a GPU ---------------------------------------------------


def key(case: Case, op: str = "sdpa", polymorphic: bool = True) -> list[int]:
    tensors = cases.make_inputs(case, torch.bfloat16, "cpu")
    words, refusal = torch.ops.cudnn_ops._sdpa_plan_key(
        *(t.to("meta") for t in tensors),
        is_causal=case.is_causal,
        with_lse=True,
        backward=op != "sdpa",
        polymorphic=polymorphic,
    )
    assert bool(words) != bool(refusal)
    return words


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
def test_one_polymorphic_plan_for_many_shapes(op):
    plan = key(CASE, op)
    for length in (1, 2, 8, 100, 1000, 1024):
        assert key(replace(CASE, length=length), op) == plan
        assert key(replace(CASE, length_kv=length), op) == plan
    assert key(replace(CASE, batch=5), op) == key(replace(CASE, batch=6), op) != plan
    assert key(replace(CASE, layout="bhsd"), op) == plan  # repacked for the run
    assert key(replace(CASE, length=1025), op) != plan
    assert key(replace(CASE, heads=8), op) != plan
    assert key(replace(CASE, is_causal=False), op) != plan
    assert key(CASE, op, polymorphic=False) != plan


def test_at_most_three_polymorphic_plans_up_to_4096():
    tensor = torch.empty(4, 4096, 8, 128, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    plans = set()
    for length in range(1, 4097):
        part = tensor[:, :, :length]
        words, _ = torch.ops.cudnn_ops._sdpa_plan_key(
            part, part, part, is_causal=True, backward=True, polymorphic=True
        )
        plans.add(tuple(words[1:]))
    # The batch's stride is of the tensor, and no part of a polymorphic plan.
    assert len(plans) == 3


def test_no_polymorphic_plan_beyond_what_cudnn_computes_rightly():
    shape = ((1, 32, 600_000, 128), torch.bfloat16)
    assert "2^31 elements" in explain("sdpa", shape, device="h200", polymorphic=True).reason
    with pytest.raises(ValueError, match=r"2\^31 elements"):
        cudnn_ops.plan_requests("sdpa", shape, plans="polymorphic")
    assert len(cudnn_ops.plan_requests("sdpa", shape, plans="both")) == 2


@pytest.mark.parametrize("device", ["a100", "l40s", "h200", "b200", "rtx_pro_6000"])
@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_cudnn_takes_polymorphic_plans(op, head_size, device):
    for is_causal in (False, True):
        shape = ((3, 4, 200, head_size), torch.bfloat16)
        answer = explain(
            op, shape, is_causal=is_causal, with_lse=True, polymorphic=True, device=device
        )
        assert answer.supported, answer.reason


# --- polymorphic plans at work ----------------------------------------------------------


def random_case(rng: random.Random) -> Case:
    def length() -> int:
        low, high = rng.choice([(1, 9), (60, 70), (120, 136), (250, 260), (400, 700)])
        return rng.randint(low, high)

    heads_kv, size = rng.randint(1, 3), rng.choice([8, 32, 64, 80, 128])
    lengths = (length(), length()) if rng.random() < 0.6 else (length(),) * 2
    return Case(
        batch=rng.randint(1, 7),
        heads=heads_kv * rng.randint(1, 3),
        heads_kv=heads_kv,
        length=lengths[0],
        length_kv=lengths[-1],
        head_size=size,
        value_size=size if rng.random() < 0.7 else rng.choice([16, 64, 128]),
        is_causal=rng.random() < 0.5,
        scale=rng.choice([None, 0.2, -0.1]),
        layout=rng.choice(LAYOUTS),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("seed", range(26))
def test_exact_and_polymorphic_results_agree(seed, device, poisoned):
    """312 random problems; several layouts have NaN between their rows and around them."""
    rng = random.Random(seed)
    problems = []
    for _ in range(12):
        case, dtype = random_case(rng), rng.choice([torch.float16, torch.bfloat16])
        problems.append((case, cases.make_inputs(case, dtype, device, seed)))
    requests = [
        request
        for case, inputs in problems
        for request in cudnn_ops.plan_requests("sdpa", *inputs, is_causal=case.is_causal)
    ]
    cudnn_ops.warmup(requests, progress=False)  # many at once: to build them takes the longest
    for case, inputs in problems:
        grad_out = cases.make_grad_out(case, inputs[0].dtype, device, seed + 1)
        with cudnn_ops.using_plan_policy("exact"):
            exact = run(case, inputs, grad_out)
        with cudnn_ops.using_plan_policy("polymorphic"):
            polymorphic = run(case, inputs, grad_out)
        cases.check_results(case, polymorphic, inputs, grad_out)
        for (name, one), (_, other) in zip(exact.items(), polymorphic.items(), strict=True):
            assert one.stride() == other.stride(), name
            scale = max(one[one.isfinite()].abs().max().item(), 0.5)
            difference = (one - other).abs().max().item()
            assert difference <= 0.03 * scale, (str(case), name, difference)


@pytest.mark.gpu
def test_the_polymorphic_policy_takes_polymorphic_plans():
    with cudnn_ops.using_plan_policy("polymorphic"):
        asked = plans_asked_for(lambda: [attend(length) for length in (64, 77, 900)])
        assert asked == ["polymorphic"]
        asked = plans_asked_for(lambda: [attend(64, batch=b) for b in (1, 2, 3, 4, 5, 6)])
    assert asked == ["polymorphic"] * 5  # declared for 1, 2, 3, 4 and 6 sequences
    assert cudnn_ops.cache_info().builds == 5


@pytest.mark.gpu
def test_the_exact_policy_takes_exact_plans():
    with cudnn_ops.using_plan_policy("exact"):
        asked = plans_asked_for(lambda: [attend(length) for length in (64, 77, 64, 900)])
    assert asked == ["exact"] * 3


@pytest.mark.gpu
def test_auto_takes_one_exact_plan_then_polymorphic_ones():
    asked = plans_asked_for(
        lambda: [attend(length) for length in (64, 64, 77, 900, 64, *range(100, 200))]
    )
    assert asked == ["exact", "polymorphic"]
    assert plans_asked_for(lambda: attend(64)) == ["exact"]
    assert plans_asked_for(lambda: attend(64, is_causal=False)) == ["exact"]  # another family
    assert cudnn_ops.cache_info().builds == 3


@pytest.mark.gpu
def test_a_shape_that_keeps_coming_back_gets_its_own_plan():
    with cudnn_ops.using_plan_policy("auto", promote_after=3):
        attend(64)
        assert plans_asked_for(lambda: [attend(77) for _ in range(3)]) == ["polymorphic"]
        assert plans_asked_for(lambda: [attend(78) for _ in range(3)]) == ["polymorphic"]
        assert plans_asked_for(lambda: attend(77)) == ["exact"]
        assert plans_asked_for(lambda: [attend(77) for _ in range(9)]) == ["exact"]
        assert plans_asked_for(lambda: attend(79)) == ["polymorphic"]


@pytest.mark.gpu
def test_warmed_up_families_need_no_first_shape():
    tensor = torch.empty(2, 96, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key = tensor[:, :2]
    requests = cudnn_ops.plan_requests(
        "sdpa", tensor, key, key, is_causal=True, training=False, plans="polymorphic"
    )
    assert cudnn_ops.warmup(requests, progress=False).built == 1

    def contiguous(length):
        return [
            torch.randn(2, length, h, 64, device="cuda").bfloat16().transpose(1, 2)
            for h in (4, 2, 2)
        ]

    # The warmed keys were views of the queries' memory: another family than dense ones.
    with cudnn_ops.record_shapes() as shapes:
        attend(200)
    assert "sequences=0" in str(shapes[0])
    with cudnn_ops.record_shapes() as shapes:
        query = contiguous(200)[0]
        torch.ops.cudnn_ops.sdpa(query, query[:, :2], query[:, :2], is_causal=True, enable_gqa=True)
    assert shapes == requests


@pytest.mark.gpu
def test_a_stored_polymorphic_plan_spares_the_first_shape_its_own(store):
    for length in (64, 77):
        attend(length)
    assert cudnn_ops.cache_info().builds == 2
    cudnn_ops.cache_clear()
    assert plans_asked_for(lambda: attend(100)) == ["polymorphic"]
    cudnn_ops.cache_clear()
    assert plans_asked_for(lambda: attend(64)) == ["exact"]  # stored too
    assert cudnn_ops.cache_info()[1:3] == (0, 1)


@pytest.mark.gpu
def test_as_many_sequences_as_there_may_be():
    case = Case(65535, 1, 1, 8, 9, 8, 8, is_causal=True)
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
    with cudnn_ops.using_plan_policy("polymorphic"), cudnn_ops.record_shapes() as shapes:
        results = run(case, inputs, grad_out)
    assert all("[65535, 1, 1024, 8]" in str(shape) for shape in shapes)
    cases.check_results(case, results, inputs, grad_out)


@pytest.mark.gpu
def test_what_cudnn_refuses_to_make_polymorphic_runs_exactly():
    """Whatever cuDNN has for the largest heads: the results are right."""
    case = Case(2, 2, 2, 60, 60, 256, 256)
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
    with cudnn_ops.using_plan_policy("polymorphic"):
        cases.check_results(case, run(case, inputs, grad_out), inputs, grad_out)
        with deterministic():
            cases.check_results(case, run(case, inputs, grad_out), inputs, grad_out)


@pytest.mark.gpu
def test_deterministic_algorithms_are_obeyed_by_polymorphic_plans():
    case = Case(2, 8, 2, 700, 700, 64, 64, is_causal=True)
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
    with deterministic(), cudnn_ops.using_plan_policy("polymorphic"):
        first, *others = (run(case, inputs, grad_out) for _ in range(5))
    cases.check_results(case, first, inputs, grad_out)
    for other in others:
        for (name, expected), (_, tensor) in zip(first.items(), other.items(), strict=True):
            assert torch.equal(tensor, expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["auto", "polymorphic"])
def test_threads_and_streams_with_lengths_of_their_own(policy):
    lengths = [64, 77, 100, 130]
    problems = {}
    for length in lengths:
        case = replace(CASE, length=length, length_kv=length)
        inputs = cases.make_inputs(case, torch.bfloat16, "cuda", length)
        grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda", length)
        problems[length] = case, inputs, grad_out
    torch.cuda.synchronize()
    wrong = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(25):
                    case, inputs, grad_out = problems[rng.choice(lengths)]
                    results = run(case, inputs, grad_out)
                    torch.cuda.current_stream().synchronize()
                    cases.check_results(case, results, inputs, grad_out)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            wrong.append(error)

    with cudnn_ops.using_plan_policy(policy, promote_after=20):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]


@pytest.mark.gpu
def test_every_gpu_has_plans_of_its_own():
    """Also on one GPU: then it says no more than that a device is part of a key."""
    inputs = cases.make_inputs(CASE, torch.bfloat16, "cpu")
    grad_out = cases.make_grad_out(CASE, torch.bfloat16, "cpu")
    for policy in ("exact", "polymorphic"):
        cudnn_ops.cache_clear()
        with cudnn_ops.using_plan_policy(policy):
            for index in range(torch.cuda.device_count()):
                here = tuple(t.to(f"cuda:{index}") for t in inputs)
                results = run(CASE, here, grad_out.to(f"cuda:{index}"))
                cases.check_results(CASE, results, here, grad_out.to(f"cuda:{index}"))
        assert cudnn_ops.cache_info().builds == 2 * torch.cuda.device_count()
    for index in range(torch.cuda.device_count()):
        requests = cudnn_ops.plan_requests("sdpa", *(t.cuda(index) for t in inputs))
        cudnn_ops.warmup(requests, device=index, progress=False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_that_uses_only_the_cpu(device):
    """Such as a data loader's worker, while another thread of the parent uses the cache."""
    inputs = cases.make_inputs(CASE, torch.float32, "cpu")
    expected = torch.ops.cudnn_ops.sdpa(*inputs, **CASE.kwargs())
    if device == "cuda":
        attend(64)
    else:
        explain("sdpa", ((1, 2, 64, 64), torch.bfloat16), device="h200")
    child = os.fork()
    if child == 0:
        good = False
        try:  # torch itself has no backward in the child of a process that has used its threads
            out = torch.ops.cudnn_ops.sdpa(*inputs, **CASE.kwargs())
            good = torch.equal(out, expected) and cudnn_ops.cache_info().size > 0
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
