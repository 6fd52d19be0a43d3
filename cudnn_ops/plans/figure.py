"""Matplotlib, which only those need who want a plot."""

from __future__ import annotations

from importlib import import_module


def figure_class(what: str) -> type:
    """``matplotlib.figure.Figure``, which draws without a display.

    Args:
        what: needs it, for the message.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise RuntimeError(f"{what} needs matplotlib: `pip install matplotlib`") from error
