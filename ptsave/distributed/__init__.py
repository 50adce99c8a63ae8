"""Fast checkpoints of many processes: storage and planners for torch.distributed.checkpoint.

torch.distributed.checkpoint calls these classes, which read files through `ptsave.dcp`.

Each class is imported on first access, because importing torch's module takes a second.
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
    """Import the module of the public class `name`, and return the class."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
