"""Derives classes from another library's base class at their first use.

The modules here can therefore be imported, documented and checked without that library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["classes_over"]


def classes_over(module: str, bases: Mapping[str, str], *, package: str) -> Callable[[str], Any]:
    """Take classes out of a module; return its ``__getattr__``, which derives them from `bases`.

    `bases` has the full path of the library's class for each name, as in
    ``{"SaveHandler": "ignite.handlers.checkpoint.DiskSaver"}``.  A missing one is an ImportError
    that names the `package` to install.  The made class stays in the module, where pickles look.
    """
    namespace = vars(sys.modules[module])
    parts: dict[str, type] = {name: namespace.pop(name) for name in bases}

    def made(name: str) -> Any:
        if name in namespace:  # the module itself asks again
            return namespace[name]
        if name not in parts:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, base_name = bases[name].rpartition(".")
        try:
            base = getattr(importlib.import_module(home), base_name)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"{module}.{name} is a {bases[name]}, which cannot be imported ({error}): pip "
                f"install {package}",
                name=home,
            ) from error
        part = parts[name]
        namespace[name] = type(name, (part, base), {"__module__": module, "__doc__": part.__doc__})
        return namespace[name]

    return made
