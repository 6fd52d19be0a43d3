"""The kernels of group norm, thread by thread on a CPU, as the operator launches them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.deviceless.fake_runtime import launched_on_a_cpu


# A torch without CUDA has no kernels of ours.
@pytest.mark.parametrize("runtime", ["cuda"] if torch.version.cuda else [])
def test_what_they_compute(runtime, tmp_path):
    launched = launched_on_a_cpu("tests.deviceless.group_norm_kernels", tmp_path)
    names = ("whole", "moments", "groups", "apply", "whole_backward", "sums", "gradient")
    orders = [f"{size}_{order}" for size in ("16", "8", "n") for order in ("first", "last")]
    all_orders = [f"group_norm_{name}_{order}" for name in names for order in orders]
    held = [
        f"group_norm_{name}_{size}_{order}"
        for name, size, order in product(("few", "many"), ("16", "8", "4", "n"), ("first", "last"))
    ]
    sizes = product(("few", "many"), ("16", "8", "4", "n"))
    held += [f"group_norm_{name}_backward_{size}" for name, size in sizes]
    resident = product(("resident", "resident_backward"), orders)
    held += [f"group_norm_{name}_{size}" for name, size in resident if not size.startswith("n")]
    held += [f"group_norm_cluster_16_{order}" for order in ("first", "last")]
    assert launched == sorted([*all_orders, *held, "group_norm_totals"])
