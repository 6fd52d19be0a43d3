"""The documentation has every environment variable that is read, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "environment.md"
FOLDERS = ("csrc", "cudnn_ops", "benchmarks")


def test_the_documentation_lists_every_variable():
    sources = [ROOT / "setup.py"]
    for folder in FOLDERS:
        sources += (path for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".py"))
    read = set()
    for path in sources:
        reads = re.findall(r'(?:getenv|environ\.get)\(\s*"(CUDNN_OPS_\w+)"', path.read_text())
        read |= set(reads)
    assert {"CUDNN_OPS_CHECK", "CUDNN_OPS_CACHE_DIR", "CUDNN_OPS_BUILD_DIR"} <= read
    listed = re.findall(r"^\| `(CUDNN_OPS_\w+)", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(read)
