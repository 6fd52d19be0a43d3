"""What Python and the operators' library tell each other beside operators: ``cudnn_ops/_C.py``."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_ops
from cudnn_ops import _C
from tests.wheels import BINDING, PYTHON, python_symbols

LIBRARY = Path(cudnn_ops.__file__).parent / "libtorch_cudnn_ops.so"

#: Makes the library warn, from a thread that Python did not start too: a store that is no folder.
WARN = """
import torch, cudnn_ops
from cudnn_ops.support import explain
def warn():
    cudnn_ops.set_store("/dev/null/none")
    cudnn_ops.cache_clear()
    explain("sdpa", ((1, 2, 64, 64), torch.bfloat16), device="h200")
"""


def test_the_library_has_no_python_in_it():
    symbols = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", LIBRARY], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "dlopen" in " ".join(symbols)
    assert not [name for name in symbols if name.startswith(("Py", "_Py"))]


def test_the_binding_is_for_every_python():
    symbols = python_symbols(LIBRARY.with_name(BINDING))
    assert "PyCapsule_New" in symbols
    assert symbols <= PYTHON


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _C.set_cache_limit(0), ValueError, "the plan cache's limit must be at least 1"),
        (lambda: _C.stop_recording(-1), ValueError, "no such recording"),
        (
            lambda: _C.describe_plan([1, 2]),
            ValueError,
            "cudnn_ops: no operator of this version has such a plan",
        ),
    ],
)
def test_errors_keep_their_types_and_messages(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert str(raised.value) == message


def test_tables_arrive_whole():
    rule = {
        "id": "one",
        "plan": "no such plan",
        "cudnn": (0, 1),
        "sm": (80, 90),
        "when": [],
        "reason": "",
    }
    with pytest.raises(ValueError, match="no plans of no such plan"):
        _C.set_known_bad([rule])
    limit = _C.cache_info()[5]
    _C.set_cache_limit(limit + 1)
    assert _C.cache_info()[5] == limit + 1
    _C.set_cache_limit(limit)


class Everything(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was dispatched to a mode")


def test_no_mode_sees_them():
    before = _C.policy()
    with Everything():
        assert _C.policy() == before
    with FakeTensorMode():
        assert _C.cache_info()[5] > 0
    with torch.profiler.profile() as profile:
        _C.policy()
    assert not [event for event in profile.events() if "cudnn_ops" in event.name]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WARN + code], capture_output=True, text=True, check=False
    )


def test_a_warning_of_the_library_is_pythons():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._C._dispatch_find_schema_or_throw("cudnn_ops::_warn", "").redispatch_boxed(
            _C._NO_KEYS, "told"
        )
    (warning,) = caught
    assert (str(warning.message), warning.category) == ("told", UserWarning)
    assert warning.filename == __file__  # the frame that called the operator


def test_a_filter_makes_an_error_of_it_in_any_thread():
    done = run("""
import threading, warnings
warnings.simplefilter("error")
def work():
    try:
        warn()
    except UserWarning as error:
        print(type(error).__name__, str(error)[:10])
for _ in range(2):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
""")
    assert done.stdout == "UserWarning cudnn_ops:\n" * 2, done.stderr


def test_a_mode_does_not_keep_a_warning_from_python():
    done = run("""
import warnings
from torch._subclasses import FakeTensorMode
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with FakeTensorMode():
        warn()
print(len([w for w in caught if "/dev/null/none" in str(w.message)]))
""")
    assert done.stdout == "1\n", done.stderr


def test_none_are_given_when_python_ends():
    done = run("""
import atexit, sys
class Late:
    def __del__(self):
        warn()
        print("done", flush=True)
sys.modules["late"] = Late()
atexit._run_exitfuncs()
warn()
print("after")
""")
    assert "after" in done.stdout, done.stderr
    assert "/dev/null/none" not in done.stderr
