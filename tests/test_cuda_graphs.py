"""CUDA graphs: capture and replay with every policy, and under torch.compile."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

import cudnn_ops
from tests.cases import sdpa as cases
from tests.cases import sdpa_features, varlen
from tests.cases.sdpa import Case, Results
from tests.cases.sdpa_features import Features

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_cache")]

CASE = Case(2, 4, 2, 96, 96, 64, 64, is_causal=True)
HEAD_MAJOR = Case(3, 4, 4, 70, 130, 64, 64, layout="bhsd")


def training_step(case, leaves, grad_out):
    out, lse = torch.ops.cudnn_ops.sdpa_with_lse(*leaves, **case.kwargs())
    return [out, lse, *torch.autograd.grad(out, leaves, grad_out)]


def on_a_side_stream(function):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()


@pytest.mark.parametrize("policy", ["auto", "exact", "polymorphic"])
@pytest.mark.parametrize("case", [CASE, HEAD_MAJOR], ids=str)
def test_capture_and_replay(case, policy):
    """Captured after one call, replayed with new values, also once the cache has let go."""
    grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in cases.make_inputs(case, torch.bfloat16, "cuda")]
    with cudnn_ops.using_plan_policy(policy):
        on_a_side_stream(lambda: training_step(case, leaves, grad_out))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = training_step(case, leaves, grad_out)
    cudnn_ops.cache_clear()
    gc.collect()
    for seed in (5, 6):
        fresh = cases.make_inputs(case, torch.bfloat16, "cuda", seed=seed)
        with torch.no_grad():
            for leaf, values in zip(leaves, fresh, strict=True):
                leaf.copy_(values)
        for result in captured:
            result.detach().fill_(torch.nan)
        graph.replay()
        results = Results(*(t.detach().clone() for t in captured))
        cases.check_results(case, results, fresh, grad_out)


def test_many_captures_hold_what_they_need_and_let_it_go():
    """The polymorphic plan's tables live as long as their graph, and no longer."""
    case = CASE
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    expected = torch.ops.cudnn_ops.sdpa(*inputs, **case.kwargs())
    with cudnn_ops.using_plan_policy("polymorphic"):
        on_a_side_stream(lambda: torch.ops.cudnn_ops.sdpa(*inputs, **case.kwargs()))
        graphs = []
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = torch.ops.cudnn_ops.sdpa(*inputs, **case.kwargs())
            graphs.append((graph, out))
    del graphs[::2]
    gc.collect()
    for graph, out in graphs:
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("policy", ["auto", "exact", "polymorphic"])
def test_no_plan_is_built_inside_a_capture(policy):
    tensor = torch.randn(1, 2, 48, 64, device="cuda", dtype=torch.bfloat16)
    with (
        cudnn_ops.using_plan_policy(policy),
        pytest.raises(RuntimeError, match=r"no plan for these shapes yet.*cudnn_ops\.warmup"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        torch.ops.cudnn_ops.sdpa(tensor, tensor, tensor)
    torch.cuda.synchronize()
    assert torch.ops.cudnn_ops.sdpa(tensor, tensor, tensor).isfinite().all()


def test_plans_are_built_in_the_background_of_a_capture():
    """One that has to load the thread's handle too; the graph holds what it had before."""
    query, key, value = cases.make_inputs(CASE, torch.bfloat16, "cuda")
    expected = torch.ops.cudnn_ops.sdpa(query, key, value, **CASE.kwargs())
    others = [
        request
        for length in (32, 64, 128)
        for request in cudnn_ops.plan_requests(
            "sdpa", query[:, :, :length].clone(), training=False, plans="exact"
        )
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for request in others:
            cudnn_ops._C.make_plan_in_background(request.words, "current")
        out = torch.ops.cudnn_ops.sdpa(query, key, value, **CASE.kwargs())
        cudnn_ops.wait_for_plans()
    info = cudnn_ops.cache_info()
    assert (info.background, info.failed) == (len(others), 0)
    out.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("plans", ["exact", "polymorphic"])
def test_warmup_is_enough_for_a_capture(plans):
    query, key, value = cases.make_inputs(CASE, torch.bfloat16, "cuda")
    requests = cudnn_ops.plan_requests(
        "sdpa", query, key, value, is_causal=True, training=False, plans=plans
    )
    assert cudnn_ops.warmup(requests, progress=False).built == 1
    torch.ops.cudnn_ops.sdpa(query.cpu(), key.cpu(), value.cpu(), **CASE.kwargs())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.cudnn_ops.sdpa(query, key, value, **CASE.kwargs())
    graph.replay()
    expected = torch.ops.cudnn_ops.sdpa(query, key, value, **CASE.kwargs())
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("policy", ["auto", "exact", "polymorphic"])
def test_reduce_overhead(policy):
    """torch.compile's own CUDA graphs, forward and backward, at several lengths."""
    torch._dynamo.reset()

    def attend(query, key, value):
        return cudnn_ops.scaled_dot_product_attention(
            query.sin(), key, value, is_causal=True, enable_gqa=True
        ).cos()

    compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True, dynamic=False)
    with cudnn_ops.using_plan_policy(policy):
        for length in (64, 80, 100):
            case = Case(2, 4, 2, length, length, 64, 64, is_causal=True)
            grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
            for seed in range(4):  # warm up, record, replay
                inputs = cases.make_inputs(case, torch.bfloat16, "cuda", seed)
                ours, eager = ([t.detach().requires_grad_() for t in inputs] for _ in range(2))
                torch.compiler.cudagraph_mark_step_begin()
                out = compiled(*ours)
                out.backward(grad_out)
                expected = attend(*eager)
                expected.backward(grad_out)
                torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
                for a, b in zip(ours, eager, strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=5e-2, atol=5e-2)
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", ["auto", "exact", "polymorphic"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
def test_replay_with_other_lengths(layout, policy):
    """The lengths are on the device: one captured graph, forward and backward, serves them all."""
    case = Case(3, 4, 2, 150, 170, 64, 64, is_causal=True, layout=layout)
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
    lens_q, lens_kv = (torch.ones(3, dtype=torch.int32, device="cuda") for _ in range(2))

    options = {"is_causal": True, "seq_lens_q": lens_q, "seq_lens_kv": lens_kv}

    def step():
        out, lse = torch.ops.cudnn_ops.sdpa_with_lse(*inputs, enable_gqa=True, **options)
        grads = torch.ops.cudnn_ops._sdpa_backward(grad_out, *inputs, out, lse, **options)
        return [out, lse, *grads[:3]]

    with cudnn_ops.using_plan_policy(policy):
        on_a_side_stream(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
    cudnn_ops.cache_clear()
    for lengths in ([150, 64, 1], [7, 150, 128], [0, 33, 65], [100, 0, 150]):
        for lengths_kv in ([170, 170, 170], [64, 129, 2], [1, 170, 63]):
            lens_q.copy_(torch.tensor(lengths))
            lens_kv.copy_(torch.tensor(lengths_kv))
            for result in captured:
                result.fill_(torch.nan)
            graph.replay()
            check_padded(case, captured, inputs, grad_out, lengths, lengths_kv)


def check_padded(case, results, inputs, grad_out, lengths, lengths_kv):
    """Each sequence by itself equals the reference, and what lies beyond it is empty."""
    out, lse, *grads = results
    for entry, (n, n_kv) in enumerate(zip(lengths, lengths_kv, strict=True)):
        rows, keys = slice(entry, entry + 1), slice(0, n_kv)
        one = Case(1, 4, 2, n, n_kv, 64, 64, is_causal=True)
        query = inputs[0][rows, :, :n]
        key, value = (tensor[rows, :, keys] for tensor in inputs[1:])
        part = Results(
            out[rows, :, :n],
            lse[rows, :, :n],
            grads[0][rows, :, :n],
            *(g[rows, :, keys] for g in grads[1:]),
        )
        if n:
            cases.check_results(one, part, (query, key, value), grad_out[rows, :, :n])
        else:
            assert not part.grad_key.any()
            assert not part.grad_value.any()
        assert not out[rows, :, n:].any()
        assert (lse[rows, :, n:] == -torch.inf).all()
        assert not grads[0][rows, :, n:].any()
        assert not any(g[rows, :, n_kv:].any() for g in grads[1:])


@pytest.mark.parametrize("policy", ["exact", "polymorphic"])
def test_every_replay_drops_other_weights(policy):
    """As torch's own dropout: the generator moves on, forward and backward stay together."""
    case = Features(2, 4, 2, 64, 64, 64, 64, dropout_p=0.4)
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    eye = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(2, 2, 64, 64).contiguous()
    leaves = [inputs[0], inputs[1], eye.requires_grad_()]

    def step():
        out = torch.ops.cudnn_ops.sdpa(*leaves, **case.kwargs())
        return [out, *torch.autograd.grad(out, leaves[2], torch.ones_like(out))]

    with cudnn_ops.using_plan_policy(policy):
        on_a_side_stream(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, grad_value = step()
    seen = []
    for _ in range(3):
        graph.replay()
        weights = out.detach().clone()  # values are one-hot, so an output is a weight
        assert not any(torch.equal(weights != 0, other != 0) for other in seen)
        assert abs((weights != 0).float().mean().item() - 0.6) < 0.05
        # with an output gradient of ones, the value's is the sum of the weights that were kept
        expected = weights.float().sum(2).unflatten(1, (2, 2)).sum(2)
        torch.testing.assert_close(grad_value.float()[..., 0], expected, rtol=3e-2, atol=3e-2)
        seen.append(weights)


@pytest.mark.parametrize("policy", ["exact", "polymorphic"])
@pytest.mark.parametrize("case", sdpa_features.SOME, ids=str)
def test_features(case, policy):
    """A captured step with each feature, replayed with other values everywhere."""
    inputs = [t.requires_grad_() for t in cases.make_inputs(case, torch.bfloat16, "cuda")]
    extras = sdpa_features.make_extras(case, torch.bfloat16, "cuda", seed=1)
    grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
    with cudnn_ops.using_plan_policy(policy):
        on_a_side_stream(lambda: sdpa_features.run(case, tuple(inputs), extras, grad_out))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sdpa_features.run(case, tuple(inputs), extras, grad_out)
        for seed in (5, 6):
            fresh = cases.make_inputs(case, torch.bfloat16, "cuda", seed)
            others = sdpa_features.make_extras(case, torch.bfloat16, "cuda", seed)
            with torch.no_grad():
                for mine, other in zip(inputs, fresh, strict=True):
                    mine.copy_(other)
                for name, other in others.items():
                    extras[name].copy_(other)
            for _, result in captured.items():
                result.fill_(torch.nan)
            graph.replay()
            sdpa_features.check(case, fresh, others, grad_out, captured)


@pytest.mark.parametrize("together", [False, True])
def test_packed_with_other_offsets(together):
    """Where the sequences begin is on the device: one graph serves every way to cut the tokens."""
    one = Features(1, 4, 4, 0, 0, 64, 64, is_causal=True, softcap=10.0)
    case = varlen.Packed((60, 60, 80), (60, 60, 80), one, same=True, together=together)
    tensors = varlen.make(case, torch.bfloat16, "cuda", seed=1)
    on_a_side_stream(lambda: varlen.run(case, tensors))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = varlen.run(case, tensors)
    for lengths in ((80, 50, 70), (80, 60, 60), (60, 78, 62)):
        other = replace(case, lengths=lengths, lengths_kv=lengths)
        tensors.offsets[0].copy_(torch.tensor(other.starts(lengths)))
        for _, result in captured.items():
            result.fill_(torch.nan)
        graph.replay()
        varlen.check(other, tensors, captured)


def test_what_packed_attention_asks_for_can_be_built_beforehand():
    """As `record_shapes` notes it: then a capture needs no call before it."""
    case = varlen.Packed((60, 40), (60, 40), Features(1, 4, 4, 0, 0, 64, 64), same=True)
    tensors = varlen.make(case, torch.bfloat16, "cuda", seed=1)
    with cudnn_ops.record_shapes() as shapes:
        varlen.run(case, tensors)
    assert [shape.op for shape in shapes] == ["sdpa", "sdpa_backward"]
    cudnn_ops.cache_clear()
    assert cudnn_ops.warmup(shapes, progress=False).built == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = varlen.run(case, tensors)
    graph.replay()
    varlen.check(case, tensors, captured)
