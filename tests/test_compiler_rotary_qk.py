"""Queries and keys that turn by the same angles: every spelling is joined, near-misses are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import cudnn_ops
from cudnn_ops.compiler.choice import Times
from cudnn_ops.compiler.pattern import Found, Pattern, shape_of
from cudnn_ops.compiler.patterns.rotary_prefix import angles_of_all_tokens
from tests.cases.compiler import Rewritten, Timed, check_swap
from tests.cases.rotary_spellings import (
    SPELLINGS,
    B,
    D,
    H,
    S,
    cohere,
    dinov3,
    ernie,
    flash_attention,
    gpt_neox,
    gpt_oss,
    gpt_oss_back,
    gptj,
    llama,
    modernbert,
    nanochat,
    olmo,
    rotate_half,
    tokens_first,
    vllm,
)

QK = "cudnn_ops.rotary_embedding_qk.default"


def _check(both: Callable[..., Any], key_heads: int = 2, **kwargs: Any) -> Rewritten:
    """``both`` is of query, key, cos and sin; the angles need no gradient."""
    dtype = kwargs.pop("dtype", torch.float64)
    angles = torch.randn(B, S, D, dtype=dtype)
    cos, sin = angles.cos(), angles.sin()

    def of_heads(query: Tensor, key: Tensor) -> Any:
        return both(query, key, cos, sin)

    inputs = (torch.randn(B, heads, S, D, dtype=dtype) for heads in (H, key_heads))
    return check_swap(of_heads, *inputs, **{"expect": ["rotary_qk"], **kwargs})


def _of_each(rotary: Callable[..., Tensor]) -> Callable[..., Any]:
    """Called twice: the angles are made into rows for each anew."""
    return lambda query, key, cos, sin: (rotary(query, cos, sin), rotary(key, cos, sin))


@pytest.mark.parametrize("rotary", SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling_is_joined(rotary):
    for key_heads in (2, H):
        found = _check(_of_each(rotary), key_heads)
        assert [str(node.target) for node in found.ours] == [QK]


@pytest.mark.parametrize("rotary", [modernbert, ernie, olmo], ids=lambda f: f.__name__)
def test_computed_in_another_precision(rotary):
    found = _check(_of_each(rotary), dtype=torch.float32)
    assert found.ours[0].args[0].meta["example_value"].dtype == torch.float32


def test_dynamic_sizes():
    for rotary in (llama, tokens_first, gpt_oss, cohere, gpt_neox):
        _check(_of_each(rotary), dynamic=True)


def test_casts_of_the_angles_that_both_read():
    def both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
        wide, key_wide = query.float(), key.float()
        query = (wide * cos + rotate_half(wide) * sin).to(query.dtype)
        return query, (key_wide * cos + rotate_half(key_wide) * sin).to(query.dtype)

    found = _check(both, dtype=torch.bfloat16, tolerance=3e-2)
    assert all(x.meta["example_value"].dtype == torch.bfloat16 for x in found.ours[0].args)


def test_norms_of_queries_and_keys_before_it():
    """As in Qwen3: the norms stay operators of their own."""

    def both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        query, key = (F.rms_norm(x, (D,), eps=1e-6) for x in (query, key))
        return llama(query, cos, sin), llama(key, cos, sin)

    found = _check(both, expect=["rotary_qk", "rms_norm", "rms_norm"])
    assert [str(node.target) for node in found.ours][-1] == QK


def test_parts_of_heads_of_two_sizes():
    """The parts are joined, and what is kept of each head stays outside."""

    def both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return gpt_neox(query, cos, sin), gpt_neox(key[..., :7], cos, sin)

    found = _check(both)
    assert "rotary_dim" not in found.ours[0].kwargs


def test_the_report_says_with_what():
    found = _check(_of_each(llama), 1)
    (candidate,) = found.report.candidates
    assert candidate.shape == (B, 1, S, D)
    assert candidate.note == f"together with one of [{B}, {H}, {S}, {D}]"


def test_layers():
    """Each layer's two belong together, and not those of different layers."""

    def layers(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for _ in range(3):
            turned = llama(query, cos, sin), llama(key, cos, sin)
            query = F.scaled_dot_product_attention(*turned, key, enable_gqa=True)
            key = query[:, :1] + key
        return query

    found = _check(layers, 1, swap=["rotary_qk"], expect=["rotary_qk"] * 3)
    assert len(found.ours) == 3


def test_three_of_them():
    """Two are joined, and one stays alone."""

    def three(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return *_of_each(llama)(query, key, cos, sin), llama(query + 1, cos, sin)

    _check(three, expect=["rotary_qk", "rotary"])


def test_without_it_each_is_swapped_by_itself():
    _check(_of_each(llama), swap=["rotary"], expect=["rotary"] * 2)


def test_a_result_that_is_used_before_the_other_is_computed():
    """What reads it moves behind: the scale of the query, its transposition."""

    def scaled(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        query = (llama(query, cos, sin) * 0.125).transpose(1, 2).float()
        return query, llama(torch.sin(key), cos, sin)

    for dtype in (torch.float64, torch.float32):
        _check(scaled, dtype=dtype)


def _behind(front: Tensor, turned: Tensor, dim: int = 2) -> Tensor:
    return torch.cat([front, turned], dim=dim)


def _eva(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _behind(x[:, :, :1], nanochat(x[:, :, 1:], cos[:, 1:], sin[:, 1:])).type_as(x)


def _eva_of_tokens_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2).contiguous()
    cos, sin = cos[:, 3:].unsqueeze(2), sin[:, 3:].unsqueeze(2)
    turned = x[:, 3:] * cos + rotate_half(x[:, 3:]) * sin
    return _behind(x[:, :3], turned, dim=1).transpose(1, 2)


def _by_narrow(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = nanochat(x.narrow(-2, 2, S - 2), cos[:, 2:], sin[:, 2:])
    return _behind(x[..., :2, :], turned, dim=-2)


def test_eva():
    """Whose results have the dtype of a third tensor."""
    model = timm.create_model("eva02_tiny_patch14_224", depth=2, img_size=56).eval()
    with torch.no_grad():
        image, pattern = torch.randn(1, 3, 56, 56), "rotary_qk"
        found = check_swap(model, image, expect=[pattern] * 2, swap=[pattern])
    targets = [node.target for graph in found.graphs for node in graph.graph.nodes]
    assert targets.count(angles_of_all_tokens) == 2


@pytest.mark.parametrize("turn", [_eva, _eva_of_tokens_first, _by_narrow, dinov3])
def test_tokens_in_front_that_do_not_turn(turn):
    """They are not put together again: the operator has cosines of 1 and sines of 0 for them."""
    found = _check(_of_each(turn))
    assert [str(node.target) for node in found.ours] == [QK]
    targets = [node.target for graph in found.graphs for node in graph.graph.nodes]
    assert torch.cat not in targets
    assert angles_of_all_tokens in targets


def _others(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _behind((x * 2)[:, :, :1], nanochat(x[:, :, 1:], cos[:, 1:], sin[:, 1:]))


def _fewer(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _behind(x[:, :, :1], nanochat(x[:, :, 2:], cos[:, 2:], sin[:, 2:]))


def _second(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _behind(x[:, :, 1:2], nanochat(x[:, :, 1:], cos[:, 1:], sin[:, 1:]))


def _at_the_end(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _behind(nanochat(x[:, :, :-1], cos[:, 1:], sin[:, 1:]), x[:, :, -1:])


def _short(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _behind(x[:, :, :1], nanochat(x[:, :, 1:-1], cos[:, 2:], sin[:, 2:]))


@pytest.mark.parametrize("turn", [_others, _fewer, _second, _at_the_end, _short])
def test_other_tokens_in_front_stay_where_they_are(turn):
    found = _check(_of_each(turn))
    targets = [node.target for graph in found.graphs for node in graph.graph.nodes]
    assert targets.count(torch.cat) == 2
    assert angles_of_all_tokens not in targets


def test_a_result_that_is_multiplied_before_the_other_is_computed():
    """Products stay where they are: their results would be kept for longer."""

    def product(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        query = llama(query, cos, sin) @ torch.ones(D, D, dtype=query.dtype)
        return query, llama(torch.sin(key), cos, sin)

    found = _check(product, expect=["rotary"] * 2)
    assert "computed only after" in found.report.candidates[0].reason


def test_random_numbers_keep_their_order():
    angles = torch.randn(B, S, D)
    cos, sin = angles.cos(), angles.sin()

    def dropped(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query = F.dropout(llama(query, cos, sin), 0.5)
        return query, llama(F.dropout(key, 0.5), cos, sin)

    inputs = torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    found, results = Rewritten(dropped), []
    for function in (dropped, found):
        torch.manual_seed(0)
        results.append(function(*inputs))
    # Dropout draws in the order of memory, and results of the operator lie in another one.
    torch.testing.assert_close(results[0][1], results[1][1])
    assert found.swapped == ["rotary"] * 2
    assert "computed only after" in found.report.candidates[0].reason


def test_other_modes():
    """Gradients that are on for one of them only."""

    def modes(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        with torch.no_grad():
            query = llama(query, cos, sin)
        return query, llama(key, cos, sin)

    _check(modes, expect=["rotary"] * 2)


def test_each_gets_a_trial_of_its_own_where_both_together_are_slower():
    """The times of the pair say nothing of the query alone, nor those of the query of the key."""
    trials: list[tuple[int, int]] = []  # results, heads

    def times(_: Pattern, found: Found) -> Times:
        trials.append((len(found.outputs), shape_of(found.inputs[0])[1]))
        times = {(2, H): (3.0, 2.0), (1, H): (1.0, 2.0), (1, 2): (2.0, 1.0)}
        return Times(*times[trials[-1]])

    angles = torch.randn(B, S, D)
    inputs = torch.randn(B, H, S, D), torch.randn(B, 2, S, D), angles.cos(), angles.sin()
    found = Rewritten(_of_each(llama))
    found.chooser = Timed(found.report, times)
    torch.testing.assert_close(found(*inputs), _of_each(llama)(*inputs))
    assert sorted(trials) == [(1, 2), (1, H), (2, H)]
    assert found.swapped == ["rotary"]
    reasons = {(c.pattern, c.shape[1]): c.reason for c in found.report.candidates}
    slower = "not faster here"
    assert reasons == {("rotary_qk", 2): slower, ("rotary", 2): slower, ("rotary", H): ""}


def _other_cos(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return llama(query, cos, sin), llama(key, cos + 1, sin)


def _other_sin(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return llama(query, cos, sin), llama(key, cos, -sin)


def _exchanged(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return llama(query, cos, sin), llama(key, sin, cos)


def _other_positions(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return (
        llama(query[:, :, :-1], cos[:, :-1], sin[:, :-1]),
        llama(key[:, :, 1:], cos[:, 1:], sin[:, 1:]),
    )


def _fewer_tokens(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    one = cos[:, :1], sin[:, :1]
    return llama(query, cos, sin), llama(key[:, :, :1], *one)


def _dependent(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    query = llama(query, cos, sin)
    return query, llama(key + query.mean(1, keepdim=True), cos, sin)


def _one_of_the_other(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return llama(llama(key, cos, sin), cos, sin), query


def _back_and_forth(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return llama(query, cos, sin), nanochat(key, cos, sin)


def _halves_and_neighbours(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return gpt_oss(query, cos, sin), vllm(key, cos, sin)


def _pairs_back(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return gpt_oss(query, cos, sin), gpt_oss_back(key, cos, sin)


def _part_and_whole(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return flash_attention(query, cos, sin), gptj(key, cos, sin)


def _other_sizes(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    part = cos[..., :4], sin[..., :4]
    return llama(query, cos, sin), llama(key[..., :4], *part)


def _other_batch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return llama(query, cos[:1], sin[:1]), llama(key[:1], cos[:1], sin[:1])


def _other_order(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return llama(query, cos, sin), tokens_first(key, cos, sin)


def _other_dtype(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = cos.float(), sin.float()
    return llama(query.double(), cos.double(), sin.double()), llama(key.float(), cos, sin)


def _other_rank(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = cos[0], sin[0]
    return query[:1] * cos + rotate_half(query[:1]) * sin, key[0] * cos + rotate_half(key[0]) * sin


def _same_tensor(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return llama(query, cos, sin), llama(query, cos, sin).sin()


def _computed_unlike(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Of copies that are made in two ways."""
    return (
        llama(query, cos * 2, sin),
        llama(key, cos * 3, sin),
    )


NEAR_MISSES = [
    *(_other_cos, _other_sin, _exchanged, _other_positions, _fewer_tokens, _dependent),
    *(_one_of_the_other, _back_and_forth, _halves_and_neighbours, _pairs_back, _part_and_whole),
    *(_other_sizes, _other_batch, _other_order, _other_dtype, _other_rank),
    *(_same_tensor, _computed_unlike),
]


@pytest.mark.parametrize("both", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_only_looks_alike_stays_apart(both):
    tolerance = 1e-4 if both is _other_dtype else 1e-5
    found = _check(both, expect=["rotary"] * 2, tolerance=tolerance)
    assert {candidate.pattern for candidate in found.report.candidates} == {"rotary"}


def test_copies_of_angles_that_were_changed_in_between():
    def changed(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos = cos * 1.0
        query = llama(query, torch.cat([cos, cos], -1)[..., :D], sin)
        cos.mul_(2)
        return query, llama(key, torch.cat([cos, cos], -1)[..., :D], sin)

    found = _check(changed, expect=["rotary"] * 2)
    assert "changed in place" in found.report.candidates[0].reason


def test_copies_of_angles_with_dropout():
    def dropped(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        turned = [llama(x, F.dropout(cos, 0.5), sin) for x in (query, key)]
        return tuple(one * 0 for one in turned)

    _check(dropped, expect=["rotary"] * 2, gradients=False)


def test_angles_that_need_a_gradient():
    def both(query: Tensor, key: Tensor, angles: Tensor) -> Any:
        return _of_each(llama)(query, key, angles.cos(), angles.sin())

    inputs = (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), torch.randn(B, S, D))
    check_swap(both, *(x.double() for x in inputs), expect=[])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rotary", [llama, gpt_neox, cohere, tokens_first], ids=lambda f: f.__name__
)
def test_on_a_gpu(rotary):
    """Compiled by inductor, forward and backward: results are as near to float64 as eager ones."""
    tokens, size = 300, D * 8
    angles = torch.rand(B, tokens, size // 2, device="cuda").repeat(1, 1, 2)
    inputs = [
        torch.randn(B, tokens, heads, size, device="cuda").transpose(1, 2) for heads in (H, 1)
    ]
    grads = [torch.randn(B, heads, tokens, size, device="cuda") for heads in (H, 1)]

    def run(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        results = function(*leaves, angles.cos().to(dtype), angles.sin().to(dtype))
        found = torch.autograd.grad(results, leaves, [grad.to(dtype) for grad in grads])
        return [x.double() for x in (*results, *found)]

    both = _of_each(rotary)
    options = {"swap": ["rotary_qk"]}
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    ours = run(torch.compile(both, backend="cudnn_ops", options=options), torch.bfloat16)
    assert [c.pattern for c in cudnn_ops.compile_report().swapped] == ["rotary_qk"]
    exact, eager = run(both, torch.float64), run(both, torch.bfloat16)
    for mine, theirs, right in zip(ours, eager, exact, strict=True):
        assert (mine - right).norm() <= 2 * (theirs - right).norm()
