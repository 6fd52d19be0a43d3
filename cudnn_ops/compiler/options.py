"""The options of ``torch.compile(..., backend="cudnn_ops", options=...)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cudnn_ops.compiler.patterns import PATTERNS

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_NAMES = ("mode", "swap", "dry_run", "inductor")


class Settings(NamedTuple):
    """Options that were checked.

    Attributes:
        mode: inductor's, as in ``torch.compile``.
        swap: the patterns that are swapped wherever they match, without measuring, on a CPU too;
            None: all patterns, where ours is faster.
        dry_run: whether candidates are reported and nothing is swapped.
        inductor: options of inductor.
    """

    mode: str = "default"
    swap: frozenset[str] | None = None
    dry_run: bool = False
    inductor: Mapping[str, Any] = {}


def settings_of(mode: str | None, options: Mapping[str, Any] | None) -> Settings:
    """The settings that options stand for.

    Raises:
        ValueError: an option, a mode or a pattern that does not exist; the message lists those that
            do.
        TypeError: an option of another type.
    """
    given = dict(options or {})
    if unknown := sorted(given.keys() - set(_NAMES)):
        raise ValueError(
            f'backend="cudnn_ops": unknown options {unknown}; it accepts {", ".join(_NAMES)}'
        )
    if mode is not None and given.get("mode", mode) != mode:
        raise ValueError(
            f'backend="cudnn_ops": mode is {mode!r} as an argument of torch.compile and '
            f"{given['mode']!r} as an option"
        )
    chosen = given.get("mode") or mode or "default"
    if chosen not in MODES:
        raise ValueError(
            f'backend="cudnn_ops": unknown mode {chosen!r}; it accepts {", ".join(MODES)}'
        )
    dry_run = given.get("dry_run", False)
    if not isinstance(dry_run, bool):
        raise TypeError(f'backend="cudnn_ops": dry_run must be a bool, got {dry_run!r}')
    inductor = given.get("inductor", {})
    if not isinstance(inductor, Mapping):
        raise TypeError(
            f'backend="cudnn_ops": inductor must be a dict of inductor\'s options, got {inductor!r}'
        )
    return Settings(chosen, _patterns(given.get("swap")), dry_run, inductor)


def _patterns(swap: Sequence[str] | None) -> frozenset[str] | None:
    if swap is None:
        return None
    if isinstance(swap, str) or not all(isinstance(name, str) for name in swap):
        raise TypeError(f'backend="cudnn_ops": swap must be a list of patterns, got {swap!r}')
    known = [pattern.name for pattern in PATTERNS]
    if unknown := sorted(set(swap) - set(known)):
        raise ValueError(
            f'backend="cudnn_ops": unknown patterns {unknown} in swap; there are {", ".join(known)}'
        )
    return frozenset(swap)
