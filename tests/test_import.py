"""``import cudnn_ops`` after ``import torch``: it imports nothing slow that torch leaves out."""

from __future__ import annotations

import json
import subprocess
import sys

import cudnn_ops

#: Packages that take long to import and that a program may never need.
SLOW = {"mpmath", "platformdirs", "sympy", "tqdm", "triton"}
SLOW_OF_TORCH = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
}


def modules_after(code: str) -> set[str]:
    command = f"import json, sys; {code}; print(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", command], check=True, capture_output=True, text=True
    )
    return set(json.loads(result.stdout))


def test_nothing_slow_is_imported():
    new = modules_after("import torch, cudnn_ops") - modules_after("import torch")
    assert "cudnn_ops" in new
    assert not new & SLOW_OF_TORCH
    assert not {name.partition(".")[0] for name in new} & SLOW


def test_flop_formulas_come_with_the_flop_counter():
    count = (
        "from torch.utils.flop_counter import flop_registry; "
        "assert torch.ops.cudnn_ops.sdpa in flop_registry"
    )
    modules_after(f"import torch, cudnn_ops; {count}")
    modules_after(f"import torch, torch.utils.flop_counter, cudnn_ops; {count}")


def test_sharding_rules_come_with_sharded_tensors():
    count = (
        "from torch.distributed.tensor import DTensor; "
        "known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs; "
        "assert torch.ops.cudnn_ops.sdpa.default in known"
    )
    modules_after(f"import torch, cudnn_ops; {count}")
    modules_after(f"import torch, torch.distributed.tensor, cudnn_ops; {count}")


def test_dynamo_imports_no_backend_and_torch_compile_all_of_it():
    """As inductor by the stock call: nothing is left for the first step."""
    dynamo = "import torch, cudnn_ops, torch._dynamo"
    named = 'assert "cudnn_ops" in torch._dynamo.list_backends()'
    compiled = 'torch.compile(torch.nn.Identity(), backend="cudnn_ops")'
    ours = {"cudnn_ops.compiler.backend", "cudnn_ops.compiler.patterns"}
    assert not modules_after(f"{dynamo}; {named}") & ours
    assert modules_after(f"{dynamo}; {compiled}") >= ours | {"torch._inductor.compile_fx"}


def test_every_public_name_is_there():
    assert set(cudnn_ops.__all__) <= set(dir(cudnn_ops))
    for name in cudnn_ops.__all__:
        assert getattr(cudnn_ops, name).__doc__, name
