"""Rotary embedding: ``x * cos + rotate(x) * sin``, of one tensor or of queries and keys at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cudnn_ops.compiler.nodes import call_of
from cudnn_ops.compiler.pattern import Found, Pattern, Refusal, applied, shape_of, tensor
from cudnn_ops.compiler.patterns.rotary_prefix import angles_of_all_tokens, rotations_of_all_tokens
from cudnn_ops.compiler.patterns.rotary_spellings import ENDS, Rotation


class Rotary(Pattern):
    """Of queries or keys, with the angles of each token for all heads."""

    name = "rotary"
    ends_in = ENDS

    def find(self, node: fx.Node) -> Iterator[Found]:
        for rotation in rotations_of_all_tokens(node):
            if _has_gradient_of_angles(rotation):
                raise Refusal("cos or sin requires a gradient")
            inputs = [rotation.x, *rotation.angles]
            build = _build_one(rotation)
            yield Found(
                rotation.nodes,
                [node],
                inputs,
                build,
                filled=rotation.filled,
                beforehand=angles_of_all_tokens,
            )


class RotaryQk(Pattern):
    """Of queries and keys that turn by the same angles: one kernel in each direction."""

    name = "rotary_qk"
    ends_in = ENDS

    def find(self, node: fx.Node) -> Iterator[Found]:
        later = [one for one in rotations_of_all_tokens(node) if not _has_gradient_of_angles(one)]
        if not later:
            return
        for end, earlier in _independent_of(node, later):
            for first in earlier:
                for second in later:
                    copies = _common_angles(first, second)
                    if copies is not None:
                        sizes = ", ".join(map(str, shape_of(end)))
                        yield Found(
                            tuple(dict.fromkeys((*first.nodes, *second.nodes))),
                            [end, node],
                            [first.x, second.x, *first.angles],
                            _build_both(first, second),
                            note=f"together with one of [{sizes}]",
                            unchanged=copies,
                            filled=(*first.filled, *second.filled),
                            alike=dict(zip(second.angles, first.angles, strict=True)),
                            beforehand=angles_of_all_tokens,
                        )


def _has_gradient_of_angles(rotation: Rotation) -> bool:
    return any(tensor(one).requires_grad for one in rotation.angles)


def _independent_of(node: fx.Node, own: list[Rotation]) -> Iterator[tuple[fx.Node, list[Rotation]]]:
    """The rotations before a node, the nearest first, up to one that the node depends on.

    That is as far as the layer before, where all layers turn what they compute.
    """
    inside = {one for rotation in own for one in rotation.nodes}
    needed = set(node.all_input_nodes)
    before = node.prev
    while before.op not in ("root", "placeholder"):
        is_needed = before in needed
        if is_needed:
            needed.update(before.all_input_nodes)
        call = call_of(before) if before not in inside else None
        if call is not None and call.name in ENDS:
            found = list(rotations_of_all_tokens(before))
            if found and is_needed:
                return
            if found:
                yield before, found
        before = before.prev


def _common_angles(first: Rotation, second: Rotation) -> tuple[fx.Node, ...] | None:
    """None where the two are no call of one operator; else what must stay as it is for that."""
    if first.x is second.x or (first.spelling, first.before) != (second.spelling, second.before):
        return None
    sizes, others = shape_of(first.x), shape_of(second.x)
    if len(sizes) != len(others) or tensor(first.x).dtype != tensor(second.x).dtype:
        return None
    same = [(a, b) for i, (a, b) in enumerate(zip(sizes, others, strict=True)) if i != first.heads]
    if not all(statically_known_true(a == b) for a, b in [*same, (first.size, second.size)]):
        return None
    compared: dict[tuple[fx.Node, fx.Node], bool] = {}
    pairs = zip(first.angles, second.angles, strict=True)  # of one spelling
    if not all(_is_equal(a, b, compared) for a, b in pairs):
        return None
    return tuple(dict.fromkeys(node for pair in compared for node in pair))


def _is_equal(first: Any, second: Any, compared: dict[tuple[fx.Node, fx.Node], bool]) -> bool:
    """Whether two values are one or are computed alike: models compute angles anew for keys.

    That holds as long as nothing writes to what was compared.
    """
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
            pairs = zip(first, second, strict=False)
            return len(first) == len(second) and all(_is_equal(*pair, compared) for pair in pairs)
        return type(first) is type(second) and bool(first == second)
    if (first, second) not in compared:
        compared[first, second] = first is second or _are_calls_alike(first, second, compared)
    return compared[first, second]


def _are_calls_alike(
    first: fx.Node, second: fx.Node, compared: dict[tuple[fx.Node, fx.Node], bool]
) -> bool:
    one, other = call_of(first), call_of(second)
    if one is None or other is None or one.name != other.name or one.name == "dropout":
        return False
    values = [node.meta.get("example_value") for node in (first, second)]
    # Autocast may be on for one of them.
    if getattr(values[0], "dtype", None) != getattr(values[1], "dtype", None):
        return False
    return all(_is_equal(one[key], other[key], compared) for key in one.arguments)


def _turn(rotation: Rotation) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    """How tensors become those of the operator, how results come back, and its options."""
    dims, heads = len(shape_of(rotation.x)), rotation.heads
    is_behind_tokens = heads == dims - 2
    options: dict[str, Any] = {"interleaved": True} if rotation.spelling.is_interleaved else {}
    is_part = not statically_known_true(rotation.size == shape_of(rotation.x)[-1])
    if rotation.spelling.is_half or is_part:
        options["rotary_dim"] = int(rotation.size)

    def there(x: Any) -> Any:
        """[batch, heads, tokens, size]."""
        if dims == 3:
            x = x.unsqueeze(0)
        return x.transpose(1, 2) if is_behind_tokens else x

    def back(out: Any) -> Any:
        if is_behind_tokens:
            out = out.transpose(1, 2)
        return out.squeeze(0) if dims == 3 else out

    return there, back, options


def _rows_of(rotation: Rotation) -> Callable[..., tuple[Any, Any]]:
    """The angles as [batch or 1, tokens, size]."""
    dims, is_back = len(shape_of(rotation.x)), rotation.spelling.is_back
    ranks = [len(shape_of(one)) for one in rotation.angles]
    # The operator would copy such rows in every call; a graph does it once for all layers.
    are_dense = [tensor(one).stride(-1) == 1 for one in rotation.angles]

    def rows(*angles: Any) -> tuple[Any, Any]:
        found = []
        for angle, rank in zip(angles, ranks, strict=True):
            for _ in range(dims - rank):
                angle = angle.unsqueeze(0)
            angle = angle.squeeze(rotation.heads)
            found.append(angle.unsqueeze(0) if dims == 3 else angle)
        if len(found) == 1:
            numbers = torch.view_as_real(found[0].resolve_conj())
            cos, sin = (numbers[..., which].contiguous() for which in (0, 1))
        else:
            cos, sin = (
                one if dense else one.contiguous()
                for one, dense in zip(found, are_dense, strict=True)
            )
        sin = -sin if is_back else sin
        if rotation.before > 0:
            both = applied(angles_of_all_tokens, cos, sin, rotation.before)
            cos, sin = both[0], both[1]
        return cos, sin

    return rows


def _build_one(rotation: Rotation) -> Callable[..., Any]:
    there, back, options = _turn(rotation)
    rows = _rows_of(rotation)
    rotary = torch.ops.cudnn_ops.rotary_embedding

    def build(x: Any, *angles: Any) -> Any:
        given = there(x), *rows(*angles)
        return back(rotary.options(*given, **options) if options else rotary.default(*given))

    return build


def _build_both(first: Rotation, second: Rotation) -> Callable[..., Any]:
    there, back, options = _turn(first)
    rows = _rows_of(first)

    def build(x: Any, other: Any, *angles: Any) -> Any:
        results = torch.ops.cudnn_ops.rotary_embedding_qk.default(
            there(x), there(other), *rows(*angles), **options
        )
        return back(results[0]), back(results[1])

    return build
