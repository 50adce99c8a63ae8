"""Makes classes over another library's base class at their first use.

So the modules of this room can be imported, documented and checked without that library.
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
    """Derive a class from ``parts[name]`` and `base`, and keep it in `module`, where pickles look.

    `base` is the full path of the library's class, as in
    ``"ignite.handlers.checkpoint.BaseSaveHandler"``.  A missing one is an ImportError that names
    the `package` to install.
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
