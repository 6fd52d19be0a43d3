"""Cases drawn at random: all of them are checked, and all that fail are told."""

from __future__ import annotations

import random
from types import ModuleType

import torch


def check_all(cases: ModuleType, count: int, device: str, rng: random.Random) -> None:
    """Draw, make and check cases of an operator, by its module of this package."""
    wrong = []
    for seed in range(count):
        case = cases.draw(rng)
        dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32])
        try:
            cases.check(case, cases.make(case, dtype, device, seed))
        except AssertionError as error:
            wrong.append(f"{dtype} {error}")
    assert not wrong, "\n".join(wrong)
