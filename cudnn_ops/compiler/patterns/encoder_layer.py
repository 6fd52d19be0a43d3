"""``nn.TransformerEncoderLayer`` in inference, a single call in Dynamo's graphs.

Without gradients torch's module calls one function for the whole layer, which inductor neither
writes nor fuses with anything. Ours is made of the operators that such a layer is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from cudnn_ops.compiler.masks import Visible, visible_of
from cudnn_ops.compiler.nodes import Call, call_of, number_of
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal, shape_of, tensor
from cudnn_ops.compiler.patterns.attention import mask_options, note_of

_WEIGHTS = (
    *("qkv_weight", "qkv_bias", "proj_weight", "proj_bias"),
    *("norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2"),
    *("ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2"),
)
#: Torch's numbers for masks: of keys [B, L], and of everything [B, heads, L, L].
_OF_KEYS, _OF_SCORES = 1, 2


class EncoderLayer(Pattern):
    """Attention, its sum and norm, two linear layers, their sum and norm; norms first or last."""

    name = "encoder_layer"
    ends_in = frozenset({"encoder_layer"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        call = call_of(node)
        assert call is not None
        eps = number_of(call["eps"])
        if len(shape_of(call["input"])) != 3 or eps is None:
            raise Refusal("there is no batch dimension, or eps is no number")
        mask, kind = call["mask"], call["mask_type"]
        if mask is not None and kind not in (_OF_KEYS, _OF_SCORES):
            raise Refusal(f"its mask is of a kind that torch gives the number {kind}")
        visible = _visible_of(call)
        tensors = {name: call[name] for name in ("input", *_WEIGHTS, "mask")}
        tensors |= {"rest": visible.rest, "lengths": visible.lengths}
        tensors = {name: one for name, one in tensors.items() if one is not None}
        inputs = list(dict.fromkeys(tensors.values()))
        width, heads, length = call["embed_dim"], call["num_heads"], shape_of(call["input"])[1]
        activation = "gelu" if call["use_gelu"] else "relu"

        def norm(named: dict[str, Any], x: Any, number: int) -> Any:
            weights = named[f"norm_weight_{number}"], named[f"norm_bias_{number}"]
            return torch.ops.cudnn_ops.layer_norm.default(x, [width], *weights, eps)

        def norm_of_sum(named: dict[str, Any], x: Any, residual: Any, number: int) -> Any:
            weights = named[f"norm_weight_{number}"], named[f"norm_bias_{number}"]
            return torch.ops.cudnn_ops.add_layer_norm.default(x, residual, [width], *weights, eps)

        def attend(named: dict[str, Any], x: Any) -> Any:
            projected = F.linear(x, named["qkv_weight"], named["qkv_bias"])
            split = projected.unflatten(-1, (3, heads, -1)).unbind(2)
            out = torch.ops.cudnn_ops.sdpa.default(
                *(split[part].transpose(1, 2) for part in range(3)),
                _seen(named.get("rest"), kind),
                is_causal=visible.is_causal,
                **mask_options(visible, [named.get("lengths")], length),
            )
            merged = out.transpose(1, 2).flatten(2)
            return F.linear(merged, named["proj_weight"], named["proj_bias"])

        def feed_forward(named: dict[str, Any], x: Any) -> Any:
            first = named["ffn_weight_1"], named["ffn_bias_1"]
            hidden = torch.ops.cudnn_ops.linear.default(x, *first, activation)
            return F.linear(hidden, named["ffn_weight_2"], named["ffn_bias_2"])

        def build(*given: Any) -> Any:
            named = {name: given[inputs.index(one)] for name, one in tensors.items()}
            x = named["input"]
            if call["norm_first"]:
                both = norm_of_sum(named, attend(named, norm(named, x, 1)), x, 2)
                return both[1] + feed_forward(named, both[0])
            x = norm_of_sum(named, attend(named, x), x, 1)[0]
            return norm_of_sum(named, feed_forward(named, x), x, 2)[0]

        yield Found([node], [node], inputs, build, note_of(mask, visible, False))


def _visible_of(call: Call) -> Visible:
    mask, length = call["mask"], shape_of(call["input"])[1]
    if mask is None:
        return Visible()
    hides = tensor(mask).dtype == torch.bool
    of_scores = call["mask_type"] == _OF_SCORES
    visible = visible_of(mask, length, length, is_hidden=hides) if of_scores else None
    # What is known in part would be a mask of another kind.
    return visible if visible and visible.rest is None else Visible(rest=mask)


def _seen(mask: Any, kind: int | None) -> Any:
    """Torch's function hides what is not zero in a mask, whatever its dtype is."""
    if mask is None:
        return None
    seen = mask == 0
    return seen[:, None, None] if kind == _OF_KEYS else seen
