"""Plans that come with the package: bundles of common shapes, one for each GPU and driver.

A wheel has them in ``common_plans/``, built by ``setup.py`` where ``CUDNN_OPS_PLANS`` names GPUs.
Nothing is read before a process needs a plan that neither its cache nor the store has; then the
headers of the files for this GPU are, and of the plans only those that calls ask for. Where nothing
fits, plans are built, and nobody is told: another version of cuDNN or of the driver is no mistake.
"""

from __future__ import annotations

import atexit
import json
import warnings
from pathlib import Path

import torch

from cudnn_ops import _C
from cudnn_ops.plans.bundle import serve

FOLDER = Path(__file__).parent / "common_plans"


def file_name(description: str) -> str:
    """Where the plans for a GPU are, by the most telling of what cuDNN compares of it."""
    return f"{_gpu_name(description)}-cuda{json.loads(description)['driverVer']}.bundle"


def _gpu_name(description: str) -> str:
    gpu = json.loads(description)
    return f"sm{gpu['deviceVer'] // 10}-{gpu['multiProcessorCount']}"


def _find_packaged(description: str) -> None:
    """Serves the plans for a described GPU, or for the current one, from now on."""
    if not FOLDER.is_dir():
        return
    index = None
    if not description:
        index = torch.cuda.current_device()
        description = _C.describe_device(index)
    for path in sorted(FOLDER.glob(f"{_gpu_name(description)}-*.bundle"), reverse=True):
        try:
            serve(path, index, description, "this GPU", is_ours=True)
        except RuntimeError:  # of other versions, or of another driver
            continue
        except (ValueError, OSError) as error:
            warnings.warn(f"cudnn_ops: plans of the package are not used: {error}", stacklevel=2)


def register() -> None:
    """Lets the operators' library ask for them."""
    torch.library.impl("cudnn_ops::_find_packaged", "CompositeExplicitAutograd", _find_packaged)
    _C.set_finds_packaged(True)
    atexit.register(_C.set_finds_packaged, False)
