"""Patches for weights: each version of a model holds only the bytes that changed since the last.

`Publisher` writes versions; `apply` and `Weights` read them.  ``versions.py`` describes the format,
which is that of slime, miles and SGLang.  `fold` and `remove` make a directory of versions smaller.

Each name is imported on first access, because importing torch takes a second.
"""

from importlib import import_module
from typing import Any

__all__ = ["Folding", "Publisher", "Weights", "apply", "fold", "remove"]

_MODULES = {"Publisher": "publishing", "Weights": "weights", "apply": "applying"} | dict.fromkeys(
    ("Folding", "fold", "remove"), "folding"
)


def __getattr__(name: str) -> Any:
    """Import the module of the public name, and return its value."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
