"""Which room may use which: the imports of cudnn_ops/, the includes of csrc/."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cudnn_ops"
CSRC = ROOT / "csrc"

#: What each room of the package may import; "" is the package itself, with its public names.
IMPORTS: dict[str, set[str]] = {
    "ops": set(),
    "nn": {"ops"},
    "support": {"ops"},
    "plans": {"ops", "support"},
    "serving": {"ops", "distributed"},
    "distributed": {"ops"},
    "compiler": {"ops", "plans"},
    "integrations": {"", "nn", "ops", "serving"},
    "server": {"integrations", "serving"},
}
#: Names at the package's root that stand for no room: what the library is asked, and the binding.
ROOT_NAMES = {"_C", "_fast"}

#: What each room of csrc may include. csrc/*.h is the library's face, and no room includes it.
INCLUDES: dict[str, set[str]] = {
    "graph": set(),
    "kernels": set(),
    "ops": {"graph", "kernels"},
    "python": {"ops"},
}
FAMILIES = {
    *("adaptive_norm", "attention", "batch_norm", "conv", "gated", "group_norm", "linear", "moe"),
    *("max_pool", "norm", "quantize", "rotary"),
}
#: Headers that the build writes.
GENERATED = re.compile(r"\w+_images\.h|graph_hash\.h|known_bad_rules\.h")
#: "from -> included" pairs that are against the rules, to be mended.
EXCEPTIONS: set[str] = set()


def parsed(text: str) -> ast.Module:
    """Without collecting garbage meanwhile.

    What another test has left may be told of then, with a traceback, for which Python parses too:
    3.11 cannot do that within parsing.
    """
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of what a file imports, inside functions too."""
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", IMPORTS)
def test_imports(room):
    wrong = []
    for path in (PACKAGE / room).rglob("*.py"):
        for module in imported_modules(path):
            package, _, rest = module.partition(".")
            name = rest.partition(".")[0]
            if package != "cudnn_ops" or name in IMPORTS[room] | {room} | ROOT_NAMES:
                continue
            wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_every_folder_of_the_package_is_a_known_room():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(IMPORTS)


def sources() -> Iterator[tuple[str, Path]]:
    """Rooms of csrc and their files."""
    for room in INCLUDES:
        for path in sorted((CSRC / room).rglob("*")):
            if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
                yield room, path


def included_files(path: Path) -> Iterator[str]:
    """Our own, from the root of csrc. NVRTC looks for a kernel's beside it."""
    beside = "kernels/" if path.suffix in {".cu", ".cuh"} else ""
    for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
        if not GENERATED.fullmatch(name):
            yield beside + name


def test_includes_are_written_from_the_root_of_csrc():
    wrong = [
        f'{path.relative_to(ROOT)}: #include "{name}"'
        for _, path in sources()
        for name in included_files(path)
        if not (CSRC / name).is_file()
    ]
    assert not wrong


def room_and_family(name: str) -> tuple[str, str]:
    """``("ops", "norm")`` of ``ops/norm/norm.h``; the family is empty outside of one."""
    room, *folders, _ = name.split("/")
    return room, folders[0] if room == "ops" and folders else ""


def is_allowed(source: str, included: str) -> bool:
    room, family = room_and_family(source)
    to_room, to_family = room_and_family(included)
    if source.endswith((".cu", ".cuh")):
        return to_room == "kernels"
    if to_room != room:
        return to_room in INCLUDES[room]
    return to_family in ("", family)


def test_includes():
    wrong = set()
    for _, path in sources():
        source = str(path.relative_to(CSRC))
        for included in included_files(path):
            if "/" in included and not is_allowed(source, included):
                wrong.add(f"{source} -> {included}")
    assert sorted(wrong - EXCEPTIONS) == []
    assert sorted(EXCEPTIONS - wrong) == [], "no longer needed"


def test_every_folder_of_operators_is_a_known_family():
    assert {path.name for path in (CSRC / "ops").iterdir() if path.is_dir()} == FAMILIES


@pytest.mark.parametrize(
    ("source", "included", "allowed"),
    [
        ("ops/attention/sdpa.cpp", "ops/attention/band.h", True),
        ("ops/attention/sdpa.cpp", "ops/autograd_node.h", True),
        ("ops/attention/sdpa.cpp", "graph/plan.h", True),
        ("ops/norm/cuda.cpp", "kernels/norm_rows.h", True),
        ("ops/norm/cuda.cpp", "ops/attention/band.h", False),
        ("ops/autograd_node.h", "ops/norm/norm.h", False),
        ("kernels/gated_cuda.cpp", "ops/gated/gated.h", False),
        ("kernels/gated_cuda.cpp", "graph/target.h", False),
        ("kernels/gated.cu", "kernels/number.cuh", True),
        ("graph/plan.cpp", "kernels/device_kernel.h", False),
    ],
)
def test_the_rules(source, included, allowed):
    assert is_allowed(source, included) == allowed
