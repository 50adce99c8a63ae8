"""Classes over a base class of another library, made when somebody asks for them.

So a module of this room can be imported, documented and checked where its library is missing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["class_over"]


def class_over(
    module: str, name: str, parts: Mapping[str, type], base: str, *, package: str
) -> Any:
    """Make a class of `module` that also is a base class's, and keep it there.

    For the ``__getattr__`` of a module: pickles name the class by that.

    Parameters
    ----------
    module : str
        The module that asks, ``__name__``.
    name : str
        The attribute that it is asked for.
    parts : mapping of str to type
        The parts of its classes that are the module's own, by their names.
    base : str
        Path of the library's class, such as ``"ignite.handlers.checkpoint.BaseSaveHandler"``.
    package : str
        The package to install for it.

    Raises
    ------
    AttributeError
        If `parts` has no such name.
    ImportError
        If the library is not installed, or has no such class.
    """
    part = parts.get(name)
    if part is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, base_name = base.rpartition(".")
    try:
        parent = getattr(importlib.import_module(home), base_name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module}.{name} is a {base}, which cannot be imported ({error}): pip install "
            f"{package}",
            name=home,
        ) from error
    made = type(name, (part, parent), {"__module__": module, "__doc__": part.__doc__})
    setattr(sys.modules[module], name, made)
    return made
