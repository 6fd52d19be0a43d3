"""What cuDNN supports but computes wrongly: ``known_bad.json``, checked for every plan.

The build puts the rules into the operators' library (``csrc/cmake/embed_known_bad.py``), so that
they hold in programs without Python. It imports this file by itself, without the package.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("known_bad.json")
_NO_END = 2**31  # above all versions
_CONDITION = re.compile(r"([\w.]+(?: % [1-9]\d*)?) (==|!=|<=?|>=?) (-?\d+)")


@dataclass(frozen=True)
class KnownBad:
    """One rule: a plan that matches it is refused, with its reason.

    Where the operators have another way to the correct result they use it, and the rule guards
    against regressions.
    """

    id: str
    plan: str
    """The kind of plan: ``"sdpa"``, ``"sdpa_backward"``, ``"paged_attention"``, ``"conv"``, ..."""
    cudnn: tuple[str | None, str | None]
    """First and last affected version. None: no version in that direction is known to be correct;
    versions that were not measured count as affected. A range ends where a fix was measured, or
    where cuDNN's release notes state one."""
    when: tuple[str, ...]
    """Conditions on the plan's parameters, all of which must hold: ``"key.size2 % 128 == 64"``."""
    reason: str
    """Completes the sentence "it is known to"."""
    source: str
    """The report, or our own measurement."""
    sm: tuple[int, int] = (80, 129)
    """First and last architecture, 90 for compute capability 9.0."""


@cache
def known_bad() -> tuple[KnownBad, ...]:
    """The rules that come with the package.

    Example:
        >>> import cudnn_ops
        >>> all(rule.reason and rule.source for rule in cudnn_ops.known_bad())
        True
    """

    def rule(fields: dict[str, Any]) -> KnownBad:
        named: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return KnownBad(**named)

    return tuple(rule(fields) for fields in json.loads(_FILE.read_text()))


def version_number(text: str) -> int:
    """``"9.19.0"`` as 91900, as cuDNN numbers its versions."""
    major, minor, patch = (int(part) for part in text.split("."))
    return major * 10000 + minor * 100 + patch


def as_numbers(rule: KnownBad) -> dict[str, Any]:
    """A rule as C++ reads it."""
    first, last = rule.cudnn
    conditions = []
    for text in rule.when:
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ValueError(f"{rule.id}: {text!r} must be a parameter, a comparison and a number")
        conditions.append((found[1], found[2], int(found[3])))
    return {
        "id": rule.id,
        "plan": rule.plan,
        "cudnn": (
            0 if first is None else version_number(first),
            _NO_END if last is None else version_number(last),
        ),
        "sm": rule.sm,
        "when": conditions,
        "reason": rule.reason,
    }


def set_known_bad(rules: tuple[KnownBad, ...]) -> None:
    """Replaces the rules, for tests."""
    from cudnn_ops import _C  # not above: the build imports this file before there is one

    _C.set_known_bad([as_numbers(rule) for rule in rules])
