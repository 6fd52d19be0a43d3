"""The compile backend's files, in JSON, beside the stored plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cudnn_ops.plans.cache import store_info
from cudnn_ops.plans.files import replacing


def path_of(name: str) -> Path | None:
    """Where a file of this name is or would be; None where plans are not stored."""
    info = store_info()
    return Path(info.folder) / name if info.folder and not info.refusal else None


def write(path: Path, content: Any) -> None:
    """For this user's processes. As with plans, what cannot be stored is done again."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(content).encode())
    except OSError:
        return
