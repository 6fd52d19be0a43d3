"""What the operators' library tells and is told: its operators without tensors (``csrc/api.cpp``).

``_C.cache_info()`` calls ``cudnn_ops::_cache_info``, and so for all of them; those whose arguments
or results have another form in Python stand below.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypedDict

import torch

_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


@cache
def _operator(name: str) -> Callable[..., Any]:
    operator = torch._C._dispatch_find_schema_or_throw(f"cudnn_ops::_{name}", "")
    # By no key: tracers, profilers and modes that see every operator have no use for these.
    return partial(operator.redispatch_boxed, _NO_KEYS)


def __getattr__(name: str) -> Callable[..., Any]:
    try:
        return _operator(name)
    except RuntimeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


class Versions(TypedDict):
    """What the library was built against."""

    torch: str
    cudnn_headers: int
    frontend_headers: int
    with_cuda: bool
    graphs: str


def versions() -> Versions:
    values = _operator("versions")()
    return Versions(zip(Versions.__annotations__, values, strict=True))  # type: ignore[misc]


def take_measurements() -> list[tuple[list[int], list[tuple[str, float]]]]:
    return [
        (words, list(zip(engines, times, strict=True)))
        for words, engines, times in zip(*_operator("take_measurements")(), strict=True)
    ]


def set_engine_table(
    sm_version: int, cudnn_version: int, engines: Sequence[tuple[Sequence[int], str]]
) -> None:
    keys, names = [words for words, _ in engines], [name for _, name in engines]
    _operator("set_engine_table")(sm_version, cudnn_version, keys, names)


def set_norm_table(
    sm_version: int,
    cudnn_version: int,
    choices: Sequence[tuple[int, bool, int, int, bool, str]],
) -> None:
    numbers, names = [[*map(int, choice[:-1])] for choice in choices], [c[-1] for c in choices]
    _operator("set_norm_table")(sm_version, cudnn_version, numbers, names)


def set_linear_table(
    sm_version: int, cudnn_version: int, choices: Sequence[tuple[Sequence[int], str]]
) -> None:
    numbers, engines = [[*map(int, row)] for row, _ in choices], [name for _, name in choices]
    _operator("set_linear_table")(sm_version, cudnn_version, numbers, engines)


def set_known_bad(rules: Sequence[Mapping[str, Any]]) -> None:
    _operator("set_known_bad")(
        [rule["id"] for rule in rules],
        [rule["plan"] for rule in rules],
        [[*rule["cudnn"], *rule["sm"]] for rule in rules],
        *([[condition[i] for condition in rule["when"]] for rule in rules] for i in range(3)),
        [rule["reason"] for rule in rules],
    )


def _warn(message: str) -> None:
    # Of the frame that called the operator; there is none between, because torch has none.
    warnings.warn(message, stacklevel=2)


torch.library.impl("cudnn_ops::_warn", "CompositeExplicitAutograd", _warn)
_operator("set_warns_in_python")(True)
atexit.register(_operator("set_warns_in_python"), False)
# Before that: a plan that is being made in the background may warn, and needs Python for it.
atexit.register(_operator("stop_background"))

# cuDNN's own libraries take half of the first call to load. Whoever begins to use CUDA has the
# device start and a model's weights moved there first, and meanwhile a thread loads them.
torch.cuda._lazy_call(_operator("load_ahead"))
