"""Derives classes from another library's base class when they are first used.

So the modules of ptsave.integrations can be imported, documented and checked without that library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["classes_over"]


def classes_over(module: str, bases: Mapping[str, str], *, package: str) -> Callable[[str], Any]:
    """Remove classes from a module; return a ``__getattr__`` that derives them from `bases`.

    `bases` maps each class's name to the full name of its base class in the library, such as
    ``{"SaveHandler": "ignite.handlers.checkpoint.DiskSaver"}``.  If the base class is missing, an
    ImportError names the `package` to install.  The derived class stays in the module, where
    pickles look for it.
    """
    namespace = vars(sys.modules[module])
    parts: dict[str, type] = {name: namespace.pop(name) for name in bases}

    def made(name: str) -> Any:
        if name in namespace:  # the module's own code asks for it again
            return namespace[name]
        if name not in parts:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, base_name = bases[name].rpartition(".")
        try:
            base = getattr(importlib.import_module(home), base_name)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"{module}.{name} needs {bases[name]}, which cannot be imported ({error}): pip "
                f"install {package}",
                name=home,
            ) from error
        part = parts[name]
        namespace[name] = type(name, (part, base), {"__module__": module, "__doc__": part.__doc__})
        return namespace[name]

    return made
