"""That the sample for compute-sanitizer has every kernel of ours in it."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.deviceless.kernel_images import images_of_library
from tests.sanitizer_sample import samples

KERNELS = Path(__file__).parents[1] / "csrc" / "kernels"


#: Their samples are named for a kernel, and run its backward too.
WITH_BACKWARD = ("gated", "max_pool", "moe_combine")


def norm_kernels() -> set[str]:
    """Those that are for every GPU, by the macros that make them."""
    text = "".join((KERNELS / f"norm_{way}.cu").read_text() for way in ("forward", "backward"))
    rows = re.findall(r"^NORM\((\w+), (\w+), (\w+),", text, re.MULTILINE)
    names = {f"{kind}_norm_{'_'.join(row)}" for row in rows for kind in ("rms", "layer")}
    return names | {f"norm_{name}" for name in re.findall(r"^NORM_ANY\((\w+),", text, re.MULTILINE)}


def group_norm_kernels() -> set[str]:
    text = "".join(path.read_text() for path in KERNELS.glob("group_norm_*.cu"))

    def calls(macro: str) -> list[tuple[str, str]]:
        return re.findall(rf"^{macro}\((\w+), (\w+),", text, re.MULTILINE)

    orders, counts = ("first", "last"), ("few", "many")
    names = {f"{name}_{size}_{order}" for name, size in calls("GROUP_NORM") for order in orders}
    names |= {f"{many}_{'_'.join(held)}" for held in calls("GROUP_NORM_HELD") for many in counts}
    backward = calls("GROUP_NORM_HELD_BACKWARD")
    names |= {f"{many}_backward_{size}" for size, _ in backward for many in counts}
    resident = calls("GROUP_NORM_RESIDENT_BACKWARD")
    names |= {f"resident_backward_{size}_{order}" for size, order in resident}
    return {f"group_norm_{name}" for name in (*names, "totals")}


def batch_norm_kernels() -> set[str]:
    """Those of training where channels are last."""
    steps = ["stats", "finish_stats", "finish_sums", "sums_of_two"]
    relus = ("none", "of_input", "of_out")
    steps += [f"{step}_{relu}" for step in ("sums", "gradient") for relu in relus]
    return {f"batch_norm_{step}_{name}" for step in steps for name in ("half", "bfloat16", "float")}


def max_pool_kernels() -> set[str]:
    types = ("half_8", "half_1", "bfloat16_8", "bfloat16_1", "float_4", "float_1")
    ways = ("", "_backward")
    return {
        f"max_pool_{windows}_{name}{way}"
        for windows, name, way in product(("any", "2x2", "3x3"), types, ways)
    }


def adaptive_norm_kernels() -> set[str]:
    text = "".join(
        (KERNELS / f"adaptive_norm_{way}.cu").read_text() for way in ("forward", "backward")
    )
    found = re.findall(r"^ADAPTIVE_NORM\((\w+),", text, re.MULTILINE)
    return {f"adaptive_norm_{name}" for name in found}


def test_every_source_is_in_the_sample():
    named = " ".join(name for name, _ in samples())
    missing = [path.stem for path in KERNELS.glob("*.cu") if path.stem not in named]
    assert not missing
    assert len(norm_kernels()) > 30
    assert len(group_norm_kernels()) == 77
    assert len(adaptive_norm_kernels()) == 54


def names_of_kernels() -> set[str]:
    """Of the samples that are named for one: the others have more than a word before a comma."""
    return {name.split(",")[0] for name, _ in samples() if re.match(r"\w+(,|$)", name)}


# A torch without CUDA has no kernels of ours.
@pytest.mark.skipif(not torch.version.cuda, reason="this torch is built without CUDA")
def test_samples_are_named_for_kernels():
    kernels = {name for image in images_of_library() for name in image.kernels}
    assert len(kernels) > 500
    assert names_of_kernels() <= kernels


def depthwise_kernels() -> set[str]:
    sized = {
        kind.format(size)
        for kind in ("rolling_{}", "forward_{}_2", "weight_{}_1", "weight_{}_2", "input_{}")
        for size in (3, 5, 7)
    }
    any_size = {
        f"{step}_{kind}" for step in ("forward", "input", "weight") for kind in ("pairs", "singles")
    }
    whole = {
        f"{kind}_{size}_{stride}_{columns}"
        for kind in ("whole", "whole_weight")
        for size, stride, columns in product((3, 5, 7), (1, 2), (7, 14))
    }
    parts = {f"{kind}_{size}" for kind in ("parts", "weight_parts") for size in (5, 7)}
    names = sized | any_size | whole | parts | {"rolling_3_wide", "add_up"}
    return {f"depthwise_conv_{name}" for name in names}


@pytest.mark.gpu
def test_the_sample_runs_the_kernels_that_it_is_named_for():
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _, call in samples():
            call()
        torch.cuda.synchronize()
    ran = Counter(event.key.split("(")[0] for event in profiled.key_averages())
    named = names_of_kernels()
    backward = {f"{name}_backward" for name in named if name.startswith(WITH_BACKWARD)}
    rows = "depthwise_conv1d_"
    backward |= {name.replace(rows, f"{rows}weight_") for name in named if name.startswith(rows)}
    others = {
        f"{kernel}_{name}"
        for kernel in (
            "conv_epilogue_add_up",
            *(f"{rows}{step}" for step in ("add_up", "input", "input_rows")),
        )
        for name in ("half", "bfloat16", "float")
    }
    norms = norm_kernels() | group_norm_kernels() | adaptive_norm_kernels()
    all_types = norms | batch_norm_kernels() | depthwise_kernels()
    assert sorted((named | backward | others | all_types) - set(ran)) == []
