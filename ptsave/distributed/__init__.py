"""Checkpoints of many processes: storage for torch.distributed.checkpoint at the engine's speed.

torch.distributed.checkpoint calls these classes, which read files through `ptsave.dcp`.

The classes are imported on first access, because torch's module takes a second.
"""

from importlib import import_module
from typing import Any

__all__ = ["LoadPlanner", "SavePlanner", "StorageReader", "StorageWriter"]

_MODULES = {
    "LoadPlanner": "planners",
    "SavePlanner": "planners",
    "StorageReader": "reader",
    "StorageWriter": "writer",
}


def __getattr__(name: str) -> Any:
    """Return a public class, importing its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
