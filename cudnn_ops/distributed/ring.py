"""Ring attention: the public functions, and the operator that autograd and compilers see."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from cudnn_ops.distributed import ring_backward, ring_steps
from cudnn_ops.distributed.arguments import (
    Options,
    autocast,
    batched,
    check_tensors,
    check_window,
    checked_starts,
    options_of,
    refuse_mask_and_dropout,
    with_regular_rows,
)
from cudnn_ops.distributed.blocks import plan_of
from cudnn_ops.distributed.group import check_agreement, group_of
from cudnn_ops.distributed.order import CHUNKS, check_order
from cudnn_ops.ops import inductor
from cudnn_ops.ops._when_imported import when_imported
from cudnn_ops.ops.sdpa import lse_dtype

OP = "cudnn_ops.distributed.ring_attention"
_ops = torch.ops.cudnn_ops


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | ProcessGroup,
    *,
    mesh_dim: int | str | None = None,
    order: str = "contiguous",
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    r"""Attention over a sequence that is split over ranks: keys and values pass on in a ring.

    Each rank holds a part of the queries, keys and values, and gets its part of the output. In
    every step it attends to the keys that it holds, while those of the next step arrive from its
    neighbour (Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context");
    the parts are merged by the formula of :func:`cudnn_ops.merge_attention_states`. The result is
    that of :func:`cudnn_ops.scaled_dot_product_attention` over the whole sequence, and so are the
    gradients, which are exact: the backward runs the ring again. A rank keeps its own tensors
    alone. Differentiable once.

    The first call with new shapes, dtypes or options compares them over all ranks, which costs one
    small all-gather and waits for the device; later calls do not ask again. All ranks must make
    the same calls in the same order; one that does not come ends in the time-out of the process
    group, whose error says so.

    Args:
        q: [batch, heads, length, head size], this rank's part; of one shape on all ranks. float16
            or bfloat16; on a CPU also float32 and float64. A [batch, length, heads, head size]
            tensor seen through ``transpose(1, 2)`` is the fast path. With ``cu_seqlens``: [tokens,
            heads, head size].
        k: [batch, heads_kv, length_kv, head size], likewise.
        v: [batch, heads_kv, length_kv, value head size], likewise.
        mesh: the ranks that share the sequence: a device mesh or a process group. One of a single
            rank is accepted.
        mesh_dim: the dimension of a mesh that has several: a name or a number.
        order: how the sequence is split. "contiguous": rank ``r`` holds part ``r``. "zigzag":
            chunks ``r`` and ``2 * ranks - 1 - r`` of ``2 * ranks``, as :func:`zigzag_shard` gives
            them; all ranks then have equal work under a causal mask, of which the last one has
            nearly twice the average in contiguous order. With a window, contiguous order passes
            keys on only as far as a query sees them.
        attn_mask: refused: its part for each pair of ranks would have to travel too.
        dropout_p: refused, unless 0.
        is_causal: query ``i`` of the whole sequence attends to no key after ``i``.
        scale: factor of the scores; None stands for ``1 / sqrt(head size)``.
        enable_gqa: allows ``heads`` to be a multiple of ``heads_kv``.
        window_size: (left, right), how many keys a query sees on each side of its own position in
            the whole sequence; -1 for all. Steps in which no query sees a key compute nothing.
        bottom_right: aligns the last query of the whole sequence with its last key; else the first
            with the first.
        softcap: as in :func:`cudnn_ops.scaled_dot_product_attention`.
        alibi_slopes: refused.
        sinks: [heads], as there; the same on all ranks. Its gradient is the part that comes from
            this rank's queries: it must be summed over the ranks, like that of any parameter.
        cu_seqlens: int32 or int64 [sequences + 1] on the CPU, the offset of each sequence in the
            whole packed batch, from 0 to ``ranks * tokens``, not decreasing; the same on all
            ranks. It is the tokens of the batch that are split, so that a sequence may lie on
            several ranks. The host plans the steps by it, and nothing waits for the GPU.
        deterministic: whether gradients are bitwise reproducible; None follows
            ``torch.use_deterministic_algorithms``.

    Returns:
        [batch, heads, length, value head size], this rank's part, or [tokens, heads, value head
        size] with ``cu_seqlens``; with the tokens before the heads in memory.

    Raises:
        ValueError: shapes, devices or options that do not fit or differ between ranks; a mesh of
            several dimensions without ``mesh_dim``; an unknown order.
        TypeError: different dtypes; a ``mesh`` that is none.
        NotImplementedError: ``attn_mask``, ``dropout_p`` or ``alibi_slopes``; as
            :func:`cudnn_ops.scaled_dot_product_attention`.
        RuntimeError: a rank that does not take part within the time-out of the process group.

    Example:
        >>> import torch, cudnn_ops.distributed
        >>> from torch.distributed import HashStore, init_process_group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
        >>> q, kv = torch.randn(2, 8, 10, 64), torch.randn(2, 2, 10, 64)
        >>> out = cudnn_ops.distributed.ring_attention(
        ...     q, kv, kv, mesh, is_causal=True, enable_gqa=True
        ... )
        >>> out.shape
        torch.Size([2, 8, 10, 64])
        >>> torch.distributed.destroy_process_group()
    """
    options = Options(
        mesh_dim=mesh_dim,
        order=order,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_size=window_size,
        bottom_right=bottom_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens=cu_seqlens,
        deterministic=deterministic,
    )
    return _attend(q, k, v, mesh, options)[0]


def ring_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh | ProcessGroup, **options: Any
) -> tuple[Tensor, Tensor]:
    """Like :func:`ring_attention`, and returns the log-sum-exp of the scores too.

    Both results are differentiable; a gradient of the log-sum-exp doubles the backward's work.

    Args:
        q: as in :func:`ring_attention`, like all arguments below.
        k: as there.
        v: as there.
        mesh: as there.
        options: the others, by keyword.

    Returns:
        The output, and the log-sum-exp over the keys of all ranks: [batch, heads, length], or
        [heads, tokens] with ``cu_seqlens``; float32 (float64 for float64 inputs), natural
        logarithm; ``-inf`` where a query sees no key and no sink.

    Raises:
        ValueError: as :func:`ring_attention`, and so are TypeError, NotImplementedError and
            RuntimeError.

    Example:
        >>> import torch, cudnn_ops.distributed
        >>> from torch.distributed import HashStore, init_process_group, group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> q = torch.randn(2, 8, 10, 64)
        >>> out, lse = cudnn_ops.distributed.ring_attention_with_lse(q, q, q, group.WORLD)
        >>> lse.shape
        torch.Size([2, 8, 10])
        >>> torch.distributed.destroy_process_group()
    """
    return _attend(q, k, v, mesh, options_of(OP + "_with_lse", options))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh | ProcessGroup, options: Options
) -> tuple[Tensor, Tensor]:
    group = group_of(OP, mesh, options.mesh_dim)
    check_order(OP, options.order)
    check_window(OP, options.window_size)
    refuse_mask_and_dropout(OP, options)
    if options.alibi_slopes is not None:
        raise NotImplementedError(
            f"{OP} does not support alibi_slopes: cuDNN counts distances from the first of the "
            "keys that it is given; all_to_all_attention supports them"
        )
    q, k, v = batched(OP, *autocast(q, k, v), options.cu_seqlens)
    is_packed = options.cu_seqlens is not None
    check_tensors(OP, q, k, v, options.enable_gqa or is_packed, options.sinks)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[2] % CHUNKS[options.order]:
            raise ValueError(
                f"{OP}: {name} has {tensor.shape[2]} tokens on this rank; zigzag order has two "
                f"equal chunks a rank, so that {group.size()} ranks share a multiple of "
                f"{2 * group.size()} tokens"
            )
    out, lse = _ops._ring_attention.default(
        *(with_regular_rows(tensor) for tensor in (q, k, v)),
        options.sinks,
        options.cu_seqlens,
        group.group_name,
        options.order,
        options.is_causal,
        q.shape[3] ** -0.5 if options.scale is None and q.shape[3] else options.scale,
        options.window_size,
        options.bottom_right,
        options.softcap,
        options.deterministic,
    )
    if out.shape[3] != v.shape[3]:
        out = out[..., : v.shape[3]]
    return (out[0].transpose(0, 1), lse[0]) if is_packed else (out, lse)


class _Geometry(NamedTuple):
    """The arguments of the operators that are no tensors, in the order of their schemas."""

    group: str
    order: str
    is_causal: bool
    scale: float | None
    window_size: tuple[int, int]
    bottom_right: bool
    softcap: float
    deterministic: bool | None

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """What the operator of each part would refuse, before anything is under way."""
        try:
            with ring_steps.computing_parts():
                _ops._sdpa_check.default(
                    q,
                    k,
                    v,
                    is_causal=self.is_causal,
                    scale=self.scale,
                    enable_gqa=True,
                    window_size=self.window_size,
                    softcap=self.softcap,
                )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise type(error)(str(error).replace("cudnn_ops.sdpa:", f"{OP}:", 1)) from None

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, what: str
    ) -> ring_steps.Call:
        """What the steps need, where all ranks agree on it."""
        group = _resolve_process_group(GroupName(self.group))
        shapes = (
            f"{name} of shape {list(t.shape)} and {t.dtype}"
            for name, t in (("q", q), ("k", k), ("v", v))
        )
        check_agreement(OP, group, q.device, [*shapes, f"{what} and {self._asdict()}"])
        ranks, length, length_kv = group.size(), q.shape[2], k.shape[2]
        starts = () if cu_seqlens is None else checked_starts(OP, cu_seqlens, ranks * length)
        window = tuple(self.window_size)
        plan = plan_of(
            ranks,
            self.order,
            length,
            length_kv,
            self.is_causal,
            window,
            self.bottom_right,
            starts,
        )
        return ring_steps.Call(OP, group, plan, self.scale, self.softcap, self.deterministic)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    geometry = _Geometry(*others)
    geometry.check(q, k, v)
    call = geometry.call(q, k, v, cu_seqlens, "the forward")
    return ring_steps.forward(call, q, k, v, sinks)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    _Geometry(*others).check(q, k, v)
    out = ring_steps.dense((*q.shape[:3], v.shape[3]), q)
    return out, q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def _backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    wanted: list[bool],
    *others: Any,
) -> list[Tensor]:
    query, key, of_sinks = wanted
    q, k, v = (with_regular_rows(tensor) for tensor in (q, k, v))
    saved = ring_backward.Saved(grad_out, grad_lse, q, k, v, out, lse)
    grads: list[Tensor | None] = [None, None, None]
    if query or key:
        what = f"the backward of {'all' if key else 'q'}"
        call = _Geometry(*others).call(q, k, v, cu_seqlens, what)
        grads = [*ring_backward.backward(call, saved, query, key)]
    if of_sinks and sinks is not None:
        grads.append(ring_backward.gradient_of_sinks(saved, sinks))
    return [q.new_empty(0) if grad is None else grad for grad in (*grads, None)[:4]]


def _backward_fake(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    wanted: list[bool],
    *_: Any,
) -> list[Tensor]:
    query, key, of_sinks = wanted
    grads = [
        ring_steps.dense_like(tensor) if wants else q.new_empty(0)
        for tensor, wants in ((q, query), (k, key), (v, key))
    ]
    if sinks is None or not of_sinks:
        return [*grads, q.new_empty(0)]
    return [*grads, torch.empty_like(sinks)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, *ctx.others = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, cu_seqlens)
    ctx.set_materialize_grads(False)


def _derivative(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    wants_q, wants_k, wants_v, wants_sinks, *others = ctx.needs_input_grad
    wanted = [wants_q, wants_k or wants_v, wants_sinks]
    grads = [None] * 4
    if grad_out is not None or grad_lse is not None:
        grads = _ops._ring_attention_backward.default(
            grad_out, grad_lse, *ctx.saved_tensors, wanted, *ctx.others
        )
    only_wanted = (
        grad if wants else None for grad, wants in zip(grads, ctx.needs_input_grad[:4], strict=True)
    )
    return *only_wanted, *(None for _ in others)


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        f"{OP}: double backward is not available, cuDNN has no second derivative of attention"
    )


_GEOMETRY = (
    "str group, str order, bool is_causal, float? scale, int[2] window_size, bool bottom_right, "
    "float softcap, bool? deterministic"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
torch.library.define(
    "cudnn_ops::_ring_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens, "
    f"{_GEOMETRY}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    "cudnn_ops::_ring_attention_backward",
    "(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor? sinks, Tensor? cu_seqlens, bool[3] wanted, {_GEOMETRY}) -> Tensor[]",
    tags=_TAGS,
)
torch.library.impl("cudnn_ops::_ring_attention", ("cpu", "cuda"), _forward)
torch.library.impl("cudnn_ops::_ring_attention_backward", ("cpu", "cuda"), _backward)
torch.library.register_fake("cudnn_ops::_ring_attention", _forward_fake)
torch.library.register_fake("cudnn_ops::_ring_attention_backward", _backward_fake)
torch.library.register_autograd("cudnn_ops::_ring_attention", _derivative, setup_context=_save)
torch.library.register_autograd("cudnn_ops::_ring_attention_backward", _no_second_derivative)
# Inductor may have been imported before these operators were defined.
when_imported("torch._inductor.lowering", inductor.register)
