"""The examples in docstrings run, on a machine without a GPU; every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import cudnn_ops
import cudnn_ops.distributed
import cudnn_ops.generation
import cudnn_ops.nn
from cudnn_ops import support

#: What is public, and where users find it.
PUBLIC: tuple[ModuleType, ...] = (
    cudnn_ops,
    cudnn_ops.distributed,
    cudnn_ops.nn,
    cudnn_ops.generation,
    support,
)
#: These measure on a GPU, or ask one.
NEED_A_GPU = {"describe_device", "tune_linear", "tune_norms", "tune_sdpa"}
#: For what is made of the package itself, such as the command line.
INTERNAL = {"format_cudnn_version", "meta_tensors", "offer_wheels", "plan_key", "prepare"}

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "cudnn_ops").rglob("*.py"))
    if path.stem != "__main__" and path.parent.name != "integrations"  # these need transformers
]


@pytest.fixture(autouse=True)
def as_it_was(tmp_path):
    """Examples change what is global: the store, the policy."""
    policy = cudnn_ops.plan_policy()
    cudnn_ops.set_plan_policy("auto")
    cudnn_ops.set_store(tmp_path)
    yield
    cudnn_ops.set_store(None)
    cudnn_ops.set_plan_policy(policy)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_function_has_an_example(module):
    functions = {
        name
        for name in module.__all__
        if inspect.isfunction(inspect.unwrap(getattr(module, name, None)))
    }
    for name in functions - NEED_A_GPU - INTERNAL:
        assert ">>> " in (getattr(module, name).__doc__ or ""), name
