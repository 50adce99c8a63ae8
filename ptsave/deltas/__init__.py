"""Patches for weights: each version of a model holds only the bytes that changed since the last.

`Publisher` writes versions and `apply` reads them, in the format of slime, miles and SGLang, which
``versions.py`` describes.  `fold` and `remove` make a directory of versions smaller.

Each name is imported on first access, because importing torch takes a second.
"""

from importlib import import_module
from typing import Any

__all__ = ["Folding", "Publisher", "apply", "fold", "remove"]

_MODULES = {"Publisher": "publishing", "apply": "applying"} | dict.fromkeys(
    ("Folding", "fold", "remove"), "folding"
)


def __getattr__(name: str) -> Any:
    """Import the module of the public name, and return its value."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
