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
from cudnn_ops.compiler.pattern import Found, Inputs, Pattern, Refusal, shape_of, tensor
from cudnn_ops.compiler.patterns.attention import mask_options, note_of
from cudnn_ops.compiler.patterns.multi_head_attention import heads_of

_WEIGHTS = (
    *("qkv_weight", "qkv_bias", "proj_weight", "proj_bias"),
    *("norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2"),
    *("ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2"),
)
#: Torch's ``mask_type``: masks of keys [B, L], and of scores [B, heads, L, L].
_OF_KEYS, _OF_SCORES = 1, 2


class EncoderLayer(Pattern):
    """Attention, its sum and norm, two linear layers, their sum and norm; norms first or last."""

    name = "encoder_layer"
    ends_in = frozenset({"encoder_layer"})

    def find(self, node: fx.Node) -> Iterator[Found]:
        call = call_of(node)
        assert call is not None
        _check(call)
        visible, sizes = _visible_of(call), [call["embed_dim"]]
        tensors = {name: call[name] for name in ("input", *_WEIGHTS, "mask")}
        inputs = Inputs({**tensors, "lengths": visible.lengths})
        heads, length, eps = call["num_heads"], shape_of(call["input"])[1], number_of(call["eps"])
        activation = "gelu" if call["use_gelu"] else "relu"
        ops = torch.ops.cudnn_ops

        def build(*given: Any) -> Any:
            named = inputs.named(given)

            def weights_of(part: str, number: int) -> tuple[Any, Any]:
                return named[f"{part}_weight_{number}"], named[f"{part}_bias_{number}"]

            def attend(x: Any) -> Any:
                projected = F.linear(x, named["qkv_weight"], named["qkv_bias"])
                seen = None if visible.rest is None else _seen(named["mask"], call["mask_type"])
                out = ops.sdpa.default(
                    *heads_of(projected, 3, heads),
                    seen,
                    is_causal=visible.is_causal,
                    **mask_options(visible, [named.get("lengths")], length),
                )
                merged = out.transpose(1, 2).flatten(2)
                return F.linear(merged, named["proj_weight"], named["proj_bias"])

            def feed_forward(x: Any, residual: Any = None) -> Any:
                hidden = ops.linear.default(x, *weights_of("ffn", 1), activation)
                if residual is None:
                    return F.linear(hidden, *weights_of("ffn", 2))
                return ops.linear.default(hidden, *weights_of("ffn", 2), residual=residual)

            first, second = weights_of("norm", 1), weights_of("norm", 2)
            x = named["input"]
            if call["norm_first"]:
                attended = attend(ops.layer_norm.default(x, sizes, *first, eps))
                normed, x = ops.add_layer_norm.default(attended, x, sizes, *second, eps)
                return feed_forward(normed, x)
            x = ops.add_layer_norm.default(attend(x), x, sizes, *first, eps)[0]
            return ops.add_layer_norm.default(feed_forward(x), x, sizes, *second, eps)[0]

        note = note_of(call["mask"], visible, False)
        yield Found([node], [node], inputs.nodes, build, note)


def _check(call: Call) -> None:
    """What no layer of torch.nn asks for is left to torch's function."""
    if len(shape_of(call["input"])) != 3:
        raise Refusal("there is no batch dimension")
    if number_of(call["eps"]) is None:
        raise Refusal("eps is no number")
    if call["mask"] is not None and call["mask_type"] not in (_OF_KEYS, _OF_SCORES):
        raise Refusal(
            f"mask_type is {call['mask_type']}: {_OF_KEYS} and {_OF_SCORES} are supported"
        )


def _visible_of(call: Call) -> Visible:
    mask, length = call["mask"], shape_of(call["input"])[1]
    if mask is None:
        return Visible()
    hides = tensor(mask).dtype == torch.bool
    of_scores = call["mask_type"] == _OF_SCORES
    visible = visible_of(mask, length, length, is_hidden=hides) if of_scores else None
    # What is known in part would be a mask of another kind.
    return visible if visible and visible.rest is None else Visible(rest=mask)


def _seen(mask: Any, mask_type: int) -> Any:
    """Torch's function hides what is not zero in a mask, whatever its dtype is."""
    seen = mask == 0
    return seen[:, None, None] if mask_type == _OF_KEYS else seen
