"""What cuDNN takes and computes wrongly: ``known_bad.json``, consulted for every plan."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cudnn_ops import _C

_FILE = Path(__file__).with_name("known_bad.json")
_NO_END = 2**31
_CONDITION = re.compile(r"([\w.]+(?: % [1-9]\d*)?) (==|!=|<=?|>=?) (-?\d+)")


@dataclass(frozen=True)
class KnownBad:
    """One rule: a plan that meets it is refused with its reason.

    Where the operators have another way to the right result they take that, and the rule guards
    against going back.
    """

    id: str
    plan: str
    """The kind of plan: ``"sdpa"``, ``"sdpa_backward"``, ``"paged_attention"``, ``"conv"``, ..."""
    cudnn: tuple[str | None, str | None]
    """First and last version. None: no version is known to be without the mistake in that
    direction, and one that nobody measured counts as bad. A row ends where a fix was measured, or
    where cuDNN's release notes state one."""
    when: tuple[str, ...]
    """Conditions on the plan's parameters, all of which must hold: ``"key.size2 % 128 == 64"``."""
    reason: str
    """Continues "it is known to"."""
    source: str
    """Who found it, or what we measured."""
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


def _range(rule: KnownBad) -> tuple[int, int]:
    """The versions as numbers, an open end as one beyond every version."""
    first, last = rule.cudnn
    return (
        0 if first is None else version_number(first),
        _NO_END if last is None else version_number(last),
    )


def _as_numbers(rule: KnownBad) -> dict[str, object]:
    conditions = []
    for text in rule.when:
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ValueError(f"{rule.id}: {text!r} is not a fact, a comparison and a number")
        conditions.append((found[1], found[2], int(found[3])))
    return {
        "id": rule.id,
        "plan": rule.plan,
        "cudnn": _range(rule),
        "sm": rule.sm,
        "when": conditions,
        "reason": rule.reason,
    }


def set_known_bad(rules: tuple[KnownBad, ...]) -> None:
    """Puts other rules in force, for tests."""
    _C.set_known_bad([_as_numbers(rule) for rule in rules])


set_known_bad(known_bad())
