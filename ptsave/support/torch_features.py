"""What the installed torch does where the supported releases (2.9 to 2.13) differ.

Each difference is found by looking at torch, not at its version number.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ptsave.support import torch_functions as stock

__all__ = [
    "IGNORES_CASE_OF_VARIABLES",
    "META_LOADS_KEEP_OFFSETS",
    "WARNS_OF_UNUSED_ARGUMENTS",
    "is_meta_location",
]


def _code_of_load() -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names and constants in the code of torch.load, whatever decorates it."""
    code = getattr(inspect.unwrap(stock.load), "__code__", None)
    return (code.co_names, code.co_consts) if code is not None else ((), ())


_names, _constants = _code_of_load()

# From 2.12 on "TRUE" sets TORCH_FORCE_WEIGHTS_ONLY_LOAD as "true" does.
IGNORES_CASE_OF_VARIABLES = "lower" in _names

# From 2.11 on torch.load(weights_only=True) warns of keyword arguments for the unpickler.
WARNS_OF_UNUSED_ARGUMENTS = any("pickle_load_args only works" in str(each) for each in _constants)

# From 2.11 on torch.load(map_location="meta") asks for no bytes, and the storages keep the
# attribute _checkpoint_offset.  Before, it reads storages and moves them.
META_LOADS_KEEP_OFFSETS = hasattr(torch.serialization, "_is_meta_location")


def is_meta_location(map_location: Any) -> bool:
    """Whether everything is loaded onto the meta device; a dict or a callable does not say so.

    >>> is_meta_location("meta"), is_meta_location(torch.device("cpu")), is_meta_location(None)
    (True, False, False)
    """
    if isinstance(map_location, torch.device):
        return map_location.type == "meta"
    return isinstance(map_location, str) and map_location == "meta"
