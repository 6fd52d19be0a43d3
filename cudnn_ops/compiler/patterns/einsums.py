"""Einsums as the two products of attention: which of their dimensions are rows, keys and channels.

What they are called does not matter, nor in what order they are: ``b h i d, b h j d -> b h i j``
and ``bqhd,bkhd->bhqk`` are both queries times keys.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx.experimental.symbolic_shapes import statically_known_true

#: What products that are no einsums would be written as.
SCORES, RESULTS = "...id,...dj->...ij", "...ij,...je->...ie"
#: Of values and the transposed weights, whose rows are the last dimension.
RESULTS_OF_VALUES = "...ej,...ij->...ei"
#: The channels of values, which the scores do not have.
_NEW = "+"

Sizes = Sequence[Any]
Dims = tuple[int, ...]


class Layout(NamedTuple):
    """How tensors become those of attention: [batch, rows, channels], with heads or without.

    Attributes:
        is_key_first: whether the keys are the first operand of the scores' product.
        query: the queries' dimensions, in attention's order.
        key: the keys'.
        value: the values'.
        result: those of attention's result, in the order of the second product's.
        rows: the sizes of the dimensions that are attention's rows, where there are several.
        batches: those of the dimensions that are its batch, where there are several.
        are_scores_in_order: whether they are [batch, rows, keys], as attention's masks are.
    """

    is_key_first: bool
    query: Dims
    key: Dims
    value: Dims
    result: Dims
    rows: tuple[int, ...]
    batches: tuple[int, ...]
    are_scores_in_order: bool

    def laid_out(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """The tensors as attention takes them."""
        query = _permuted(query, self.query)
        if self.rows:
            query = query.flatten(1, 2)
        return (
            self._with_one_batch(query),
            self._with_one_batch(_permuted(key, self.key)),
            self._with_one_batch(_permuted(value, self.value)),
        )

    def _with_one_batch(self, x: Any) -> Any:
        return x.flatten(0, len(self.batches) - 1) if self.batches else x

    def of_result(self, result: Any) -> Any:
        """Attention's result as the second product gives it."""
        if self.rows:
            result = result.unflatten(1, self.rows)
        if self.batches:
            result = result.unflatten(0, self.batches)
        return _permuted(result, self.result)


def layout_of(
    scores: str, operands: Sequence[Sizes], results: str, others: Sequence[Sizes], weights: int
) -> Layout | None:
    """The layout of two einsums that are attention's products; None where they are not.

    Args:
        scores: the equation of queries and keys, in either order.
        operands: their sizes, in this order.
        results: the equation of the softmax's result and the values, in either order.
        others: their sizes, in this order.
        weights: which of these the softmax's result is, 0 or 1.
    """
    first, second = _terms(scores, operands), _terms(results, others)
    if first is None or second is None:
        return None
    key = first[2][-1]
    is_key_first = key in first[0]
    of_key, of_query = first[:2] if is_key_first else first[1::-1]
    both = [name for name in of_query if name in of_key]
    batch = "".join(name for name in first[2] if name in both)
    rows = "".join(name for name in first[2][:-1] if name not in both)
    channels = "".join(name for name in both if name not in batch)
    # The scores' dimensions have other names in the second equation.
    names = dict(zip(second[weights], first[2], strict=True))
    of_value, of_result = (
        "".join(names.get(name, _NEW) for name in term) for term in (second[1 - weights], second[2])
    )
    wanted = (
        (of_query, batch + rows + channels),
        (of_key, batch + key + channels),
        (of_value, batch + key + _NEW),
        (batch + rows + _NEW, of_result),
    )
    if len(channels) != 1 or any(sorted(one) != sorted(other) for one, other in wanted):
        return None
    query, keys, value, result = (tuple(map(given.index, order)) for given, order in wanted)
    sizes = operands[1] if is_key_first else operands[0]
    ordered = [sizes[dim] for dim in query]
    several = _several(ordered, len(batch), len(rows))
    if several is None:
        return None
    is_in_order = batch + rows + key == first[2] and len(rows) == 1
    return Layout(is_key_first, query, keys, value, result, *several, is_in_order)


def _several(sizes: Sequence[Any], batch: int, rows: int) -> tuple[Dims, Dims] | None:
    """What of a query's sizes becomes rows and batch where several do; None where some cannot."""
    if (batch, rows) != (1, 2) and (batch == 0 or rows != 1):
        return None
    of_rows = tuple(sizes[1:3]) if rows > 1 else ()
    of_batch = tuple(sizes[: batch - 1]) if batch > 2 else ()
    are_known = all(isinstance(size, int) for size in (*of_rows, *of_batch))
    return (of_rows, of_batch) if are_known else None


def of_matmuls(sizes: Sizes) -> Layout | None:
    """The layout of two matrix products, of queries of these sizes; the keys are transposed."""
    dims = len(sizes)
    several = _several(sizes, dims - 2, 1)
    if several is None:
        return None
    in_order = tuple(range(dims))
    keys = (*in_order[:-2], dims - 1, dims - 2)
    return Layout(False, in_order, keys, in_order, in_order, *several, True)


def are_in_order(dims: Dims) -> bool:
    """Whether dimensions are as they are."""
    return dims == tuple(range(len(dims)))


def _terms(equation: str, operands: Sequence[Sizes]) -> tuple[str, str, str] | None:
    """The names of both operands' dimensions and the result's, a letter each."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2:
        return None
    if "..." in result:
        counts = {len(size) - len(term) + 3 for term, size in zip(terms, operands, strict=True)}
        if len(counts) != 1 or not all("..." in term for term in terms):
            return None
        free = [letter for letter in string.ascii_letters if letter not in equation]
        rest = "".join(free[: counts.pop()])
        terms, result = [term.replace("...", rest) for term in terms], result.replace("...", rest)
    known: dict[str, Any] = {}
    for term, sizes in zip(terms, operands, strict=True):
        if len(term) != len(sizes) or len(set(term)) != len(term):
            return None
        for name, size in zip(term, sizes, strict=True):
            # Of two sizes, one may be 1 and spread over the other.
            if not statically_known_true(known.setdefault(name, size) == size):
                return None
    is_plain = len(set(result)) == len(result) and known.keys() >= set(result)
    return (terms[0], terms[1], result) if result and is_plain else None


def _permuted(x: Any, dims: Dims) -> Any:
    return x if are_in_order(dims) else x.permute(dims)
