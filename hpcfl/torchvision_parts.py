"""Import torchvision's data sets, networks and changes of images, only when a run needs them.

No other module imports torchvision: the import costs seconds in every rank.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Literal

import torch

from hpcfl.errors import UserError, one_line

_EXPECTED_OPERATORS = ("nms", "qnms")
# A fragment forgets its operators when it is collected, so it lives as long as this module.
_fragment = torch.library.Library("torchvision", "FRAGMENT")


@functools.cache
def torchvision_part(name: Literal["datasets", "models", "transforms.functional"]) -> ModuleType:
    """Import a part of torchvision; raise UserError if that fails."""
    try:
        return _imported(f"torchvision.{name}")
    except (ImportError, RuntimeError) as error:
        what = {"datasets": "data source", "models": "model"}.get(name, "change of images")
        raise UserError(
            f"this {what} needs torchvision, which cannot be imported ({one_line(error)}): "
            f"install the one that matches torch {torch.__version__} with: pip install torchvision"
        ) from error


def _imported(module: str) -> ModuleType:
    """Import a module of torchvision; if it lacks operators, declare them and import it again.

    A CUDA build of torchvision beside a CPU-only torch cannot load its operators and then fails to
    import; data sets and networks do not need them, only their names.
    """
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    # the parts that were imported belong to a package that was not
    for part in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[part]
    for operator in _EXPECTED_OPERATORS:
        if not hasattr(torch.ops.torchvision, operator):
            _fragment.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(module)
