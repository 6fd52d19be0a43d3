"""``nn.MultiheadAttention``, a single call in Dynamo's graphs: without its copies.

Torch's function copies queries, keys and values to separate tensors before it attends, and has the
sequence before the batch. Ours reads them where the projection leaves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from cudnn_ops.compiler.nodes import Call, call_of, number_of
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal, shape_of

#: The mask is read by torch's function, and not by ours.
_TENSORS = (
    *("query", "key", "attn_mask"),
    *("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias"),
)


class MultiHeadAttention(Pattern):
    """``F.multi_head_attention_forward`` by one or two projections, our attention and the last one.

    Its first result; the second one, the weights, must be asked for by nobody.
    """

    name = "multi_head_attention"
    ends_in = frozenset({"getitem"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        item = call_of(node)
        assert item is not None
        source = item["input"]
        call = call_of(source) if isinstance(source, fx.Node) else None
        if call is None or call.name != "multi_head_attention" or item["index"] != 0:
            return
        _check(call)
        dropout_p = _dropout_of(call)
        tensors = {name: call[name] for name in _TENSORS if call[name] is not None}
        inputs = list(dict.fromkeys(tensors.values()))
        heads, is_self = call["num_heads"], call["query"] is call["key"]

        def build(*given: Any) -> Any:
            named = {name: given[inputs.index(one)] for name, one in tensors.items()}
            weight, bias = named["in_proj_weight"], named.get("in_proj_bias")
            query = named["query"].transpose(0, 1)  # [B, S, E]
            if is_self:
                parts = _heads(F.linear(query, weight, bias), 3, heads)
            else:
                # A projection of the queries, and one of keys and values.
                key, width = named["key"].transpose(0, 1), call["embed_dim_to_check"]
                biases = (None, None) if bias is None else (bias[:width], bias[width:])
                parts = [
                    *_heads(F.linear(query, weight[:width], biases[0]), 1, heads),
                    *_heads(F.linear(key, weight[width:], biases[1]), 2, heads),
                ]
            is_causal = bool(call["is_causal"])
            out = torch.ops.cudnn_ops.sdpa.default(*parts, None, dropout_p, is_causal)
            merged = out.transpose(1, 2).flatten(2)
            out = F.linear(merged, named["out_proj_weight"], named.get("out_proj_bias"))
            return out.transpose(0, 1)

        # Dynamo has a node for the weights too, whether anything reads them or not.
        unread = (user for user in source.users if user is not node and not user.users)
        yield Found((source, *unread, node), [node], inputs, build)


def _heads(projected: Any, parts: int, heads: int) -> list[Any]:
    """Each part of [B, S, parts * E] as [B, heads, S, D], views of it."""
    split = projected.unflatten(-1, (parts, heads, -1)).unbind(2)
    return [split[part].transpose(1, 2) for part in range(parts)]


def _dropout_of(call: Call) -> float:
    if not call["training"]:
        return 0.0
    dropout_p = number_of(call["dropout_p"])
    if dropout_p is None:
        raise Refusal("dropout_p is no number")
    return float(dropout_p)


def _check(call: Call) -> None:
    """What torch's function has beyond plain attention is left to it."""
    if len(shape_of(call["query"])) != 3:
        raise Refusal("there is no batch dimension")
    if call["use_separate_proj_weight"] or call["key"] is not call["value"]:
        raise Refusal("keys and values are of different inputs, or of other sizes than queries")
    if call["key_padding_mask"] is not None:
        raise Refusal("there is a key_padding_mask")
    # With this hint torch's function ignores the mask, unless it gives the weights.
    if call["attn_mask"] is not None and not (call["is_causal"] and not call["need_weights"]):
        raise Refusal("there is an attn_mask that is not said to be causal")
    given = ("bias_k", "bias_v", "static_k", "static_v")
    if call["add_zero_attn"] or any(call[name] is not None for name in given):
        raise Refusal("keys or values are added or given")
    if call["embed_dim_to_check"] != shape_of(call["query"])[-1]:
        raise Refusal("embed_dim is not the size of the queries")
