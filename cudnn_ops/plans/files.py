"""Files that other processes may read at any time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file for what is to stand at ``path``, which only this user can read and write.

    It is written beside its place and moved into it: a reader sees all of it or none. By its name
    the store of plans knows, in its folder, what a process has left that died meanwhile.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
