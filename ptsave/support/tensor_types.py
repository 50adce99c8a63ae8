"""The types of tensors, where torch may not be there: what is looked at may be an outline."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from ptsave._core import OutlinedTensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["is_tensor", "tensor_types"]


def tensor_types() -> tuple[Any, ...]:
    """Return those of which an object may hold instances: torch's own only if it is imported."""
    torch = sys.modules.get("torch")
    return (OutlinedTensor,) if torch is None else (torch.Tensor, OutlinedTensor)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether something is a tensor, or stands for one.

    >>> is_tensor([1.0])
    False
    """
    return isinstance(value, tensor_types())
