"""Arguments that the dispatcher would misread, or refuse in words of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

#: Integers by sequence, which people hand over as a list.
_LENGTHS = (
    "seq_lens_q",
    "seq_lens_kv",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
)
_PER_HEAD = ("alibi_slopes", "sinks")


def refuse_one_number(window_size: object) -> None:
    """Raises TypeError for a window that is one number: the dispatcher takes it for both sides."""
    if isinstance(window_size, int):
        raise TypeError(
            f"window_size must be (left, right), got {window_size}: ({window_size}, 0) shows a "
            f"query that many keys before its own, ({window_size}, {window_size}) as many behind "
            "it too, and -1 stands for all"
        )


def refuse_lists(arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for what has to be a tensor and is none."""
    for names, dtype in ((_LENGTHS, "int32"), (_PER_HEAD, "float32"), (("rng_state",), "int64")):
        for name in names:
            given = arguments.get(name)
            if given is not None and not isinstance(given, Tensor):
                raise TypeError(
                    f"{name} must be a tensor on the device of the query, got a "
                    f"{type(given).__name__}: torch.tensor(..., dtype=torch.{dtype}, "
                    "device=query.device)"
                )
