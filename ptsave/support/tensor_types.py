"""The types of tensors, for code that may run without torch, on outlines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from ptsave._core import OutlinedTensor

if TYPE_CHECKING:
    from torch import Tensor


def tensor_types() -> tuple[Any, ...]:
    """Return the types that a tensor may have; torch's own type only if torch is imported."""
    torch = sys.modules.get("torch")
    return (OutlinedTensor,) if torch is None else (torch.Tensor, OutlinedTensor)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor, or the outline of a tensor."""
    return isinstance(value, tensor_types())
