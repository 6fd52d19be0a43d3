"""When a new shape gets a plan of its own, and how a plan's engine is chosen.

An *exact* plan serves one set of shapes. A *polymorphic* one is declared for a larger batch and
longer sequences than it is given and serves every shape of its family: same operator, dtype, heads,
head sizes and memory order, any batch and length up to those that it is declared for. Results are
equal up to rounding; a polymorphic plan costs a few percent more GPU time and needs no new build.
Under ``"auto"`` a shape gets its exact plan when its calls have lost as much of the GPU's time, by
an estimate, as a plan takes to be built. A thread in the background builds it meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from cudnn_ops import _C

Policy = Literal["auto", "exact", "polymorphic"]

_POLICIES: tuple[Policy, ...] = get_args(Policy)
_BY_TIME = -1


def plan_policy() -> Policy:
    """The current policy.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.plan_policy()
        'auto'
    """
    return _POLICIES[_C.policy()]


def set_plan_policy(policy: Policy, *, promote_after: int | Literal["time"] | None = None) -> None:
    """Sets the policy of this process, for all threads.

    Args:
        policy: ``"auto"``: the first shape of a family gets an exact plan; from the second on, new
            shapes run on the family's polymorphic plan, and one that loses enough time on it gets
            an exact plan of its own. ``"exact"``: an exact plan for each shape. ``"polymorphic"``:
            polymorphic plans wherever cuDNN has them. The environment variable
            ``CUDNN_OPS_PLAN_POLICY`` sets the initial value; its default is ``"auto"``.
        promote_after: when a shape on a polymorphic plan gets its own, under ``"auto"``.
            ``"time"``, the default: when its calls have lost as much of the GPU's time, by an
            estimate, as plans have taken to be built in this process, or to be read where the
            store or a bundle has it. The plan is then made in the background, and calls take it as
            soon as it is there: results change by rounding at a call that is not the same in each
            run. Or a number of calls, after which the next call makes the plan itself. Norms and
            linear layers, which have kernels without plans, get theirs after that number, or 256.
            Under ``torch.use_deterministic_algorithms(True)`` no plan is made in the background,
            and time promotes no attention. None leaves it unchanged.

    Raises:
        ValueError: another policy; a negative count, or another word.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.set_plan_policy("exact")
        >>> cudnn_ops.set_plan_policy("auto", promote_after=256)
        >>> cudnn_ops.set_plan_policy("auto", promote_after="time")
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy must be one of {', '.join(_POLICIES)}, got {policy!r}")
    if promote_after is not None:
        _C.set_promote_after(_calls(promote_after))
    _C.set_policy(_POLICIES.index(policy))


def _calls(promote_after: int | str) -> int:
    if promote_after == "time":
        return _BY_TIME
    if isinstance(promote_after, str) or promote_after < 0:
        raise ValueError(
            f'promote_after must be "time" or a number of calls, at least 0, got {promote_after!r}'
        )
    return promote_after


@contextmanager
def using_plan_policy(
    policy: Policy, *, promote_after: int | Literal["time"] | None = None
) -> Iterator[None]:
    """A context in which ``policy`` applies, in all threads: autograd's run the backward.

    Example:
        >>> import cudnn_ops
        >>> with cudnn_ops.using_plan_policy("polymorphic"):
        ...     cudnn_ops.plan_policy()
        'polymorphic'
    """
    before, promoted_before = plan_policy(), _C.promote_after()
    set_plan_policy(policy, promote_after=promote_after)
    try:
        yield
    finally:
        set_plan_policy(before)
        _C.set_promote_after(promoted_before)


def set_autotune(on: bool) -> None:
    """Sets whether new exact plans use the engine that is measured to be the fastest.

    The first call with a shape then builds every engine that cuDNN offers for it and times each on
    its inputs, writing to scratch memory. This takes seconds and waits for the GPU; the fastest
    plan is stored. Off by default, unless the environment has ``CUDNN_OPS_AUTOTUNE=1``. Plans in
    the cache do not change. Linear layers that are called often are also timed by what runs them
    without a plan, once in a process, and run by what is faster.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.set_autotune(False)
    """
    _C.set_autotune(int(on))


def _read_environment() -> None:
    policy = os.environ.get("CUDNN_OPS_PLAN_POLICY", "auto")
    if policy not in _POLICIES:
        raise ImportError(f"CUDNN_OPS_PLAN_POLICY is one of {', '.join(_POLICIES)}, got {policy!r}")
    autotune = os.environ.get("CUDNN_OPS_AUTOTUNE", "0")
    if autotune not in ("0", "1"):
        raise ImportError(f"CUDNN_OPS_AUTOTUNE is 0 or 1, got {autotune!r}")
    set_plan_policy(policy)
    set_autotune(autotune == "1")


_read_environment()
