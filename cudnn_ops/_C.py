"""What the operators' library tells and is told: ``csrc/api.h``, by operators without tensors."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, TypedDict

import torch

_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


@cache
def _operator(name: str) -> Any:
    return torch._C._dispatch_find_schema_or_throw(f"cudnn_ops::{name}", "")


def _call(name: str, *args: object) -> Any:
    # By no key: tracers, profilers and modes that see every operator have no use for these.
    return _operator(name).redispatch_boxed(_NO_KEYS, *args)


class Versions(TypedDict):
    """What the library was built against."""

    torch: str
    cudnn_headers: int
    frontend_headers: int
    with_cuda: bool
    graphs: str


def versions() -> Versions:
    torch_version, cudnn_headers, frontend_headers, with_cuda, graphs = _call("_versions")
    return {
        "torch": torch_version,
        "cudnn_headers": cudnn_headers,
        "frontend_headers": frontend_headers,
        "with_cuda": with_cuda,
        "graphs": graphs,
    }


def cache_info() -> tuple[int, int, int, int, int, int]:
    return _call("_cache_info")


def cache_clear() -> None:
    _call("_cache_clear")


def set_cache_limit(limit: int) -> None:
    _call("_set_cache_limit", limit)


def start_recording() -> int:
    return _call("_start_recording")


def stop_recording(recording: int) -> list[list[int]]:
    return _call("_stop_recording", recording)


def describe_plan(words: Sequence[int]) -> str:
    return _call("_describe_plan", words)


def make_plan(words: Sequence[int], device: str) -> tuple[bool, str, str, int]:
    return _call("_make_plan", words, device)


def policy() -> int:
    return _call("_policy")


def set_policy(policy: int) -> None:
    _call("_set_policy", policy)


def promote_after() -> int:
    return _call("_promote_after")


def set_promote_after(calls: int) -> None:
    _call("_set_promote_after", calls)


def autotune() -> int:
    return _call("_autotune")


def set_autotune(autotune: int) -> None:
    _call("_set_autotune", autotune)


def take_measurements() -> list[tuple[list[int], list[tuple[str, float]]]]:
    return [
        (words, list(zip(engines, times, strict=True)))
        for words, engines, times in zip(*_call("_take_measurements"), strict=True)
    ]


def set_engine_table(
    sm_version: int, cudnn_version: int, engines: Sequence[tuple[Sequence[int], str]]
) -> None:
    keys, names = [words for words, _ in engines], [name for _, name in engines]
    _call("_set_engine_table", sm_version, cudnn_version, keys, names)


def set_norm_table(
    sm_version: int,
    cudnn_version: int,
    choices: Sequence[tuple[int, bool, int, int, bool, str]],
) -> None:
    numbers, names = [[*map(int, choice[:-1])] for choice in choices], [c[-1] for c in choices]
    _call("_set_norm_table", sm_version, cudnn_version, numbers, names)


class KnownBad(TypedDict):
    """A rule, whose conditions are facts, comparisons and numbers."""

    id: str
    plan: str
    cudnn: tuple[int, int]
    sm: tuple[int, int]
    when: Sequence[tuple[str, str, int]]
    reason: str


def set_known_bad(rules: Sequence[KnownBad]) -> None:
    _call(
        "_set_known_bad",
        [rule["id"] for rule in rules],
        [rule["plan"] for rule in rules],
        [[*rule["cudnn"], *rule["sm"]] for rule in rules],
        *([[condition[i] for condition in rule["when"]] for rule in rules] for i in range(3)),
        [rule["reason"] for rule in rules],
    )


def known_bad(words: Sequence[int], sm_version: int, cudnn_version: int) -> str:
    return _call("_known_bad", words, sm_version, cudnn_version)


def set_context_parallel(active: bool) -> None:
    _call("_set_context_parallel", active)


def set_computes_parts(computes: bool) -> bool:
    return _call("_set_computes_parts", computes)


def set_store(folder: str, limit: int) -> None:
    _call("_set_store", folder, limit)


def store_info() -> tuple[str, str, int, int, int]:
    return _call("_store_info")


def store_clear() -> int:
    return _call("_store_clear")


def write_plan(words: Sequence[int], device: str, folder: str) -> tuple[bool, str, str]:
    return _call("_write_plan", words, device, folder)


def set_bundle(
    path: str,
    descriptor: int,
    gpu: str,
    devices: Sequence[int],
    described: str,
    names: Sequence[str],
    offsets: Sequence[int],
) -> None:
    _call("_set_bundle", path, descriptor, gpu, devices, described, names, offsets)


def set_cudnn_fallback_path(path: str) -> None:
    _call("_set_cudnn_fallback_path", path)


def cudnn_version() -> int:
    return _call("_cudnn_version")


def cudnn_path() -> str:
    return _call("_cudnn_path")


def describe_device(index: int) -> str:
    return _call("_describe_device", index)


def _warn(message: str) -> None:
    # Of the frame that called the operator; there is none between, because torch has none.
    warnings.warn(message, stacklevel=2)


torch.library.impl("cudnn_ops::_warn", "CompositeExplicitAutograd", _warn)
_call("_set_warns_in_python", True)
atexit.register(_call, "_set_warns_in_python", False)
