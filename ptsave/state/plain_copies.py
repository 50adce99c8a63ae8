"""Plans the copies of a state dict's entries into tensors before anything is touched.

Copying a plain tensor, which is only numbers in memory, runs no code of users, so loading may do it
at any time. torch decides on everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Size, Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.overrides import is_tensor_like

from ptsave._C import copies_plainly
from ptsave.state.load_errors import mismatch_message, no_copy_message, no_tensor_message

__all__ = [
    "PLAIN_TYPES",
    "Mismatch",
    "ModulePlan",
    "are_plain",
    "copies_plainly",
    "differ",
    "plan_module",
    "shares_bytes",
]

# Key, shape in the state dict and shape in the module.
Mismatch: TypeAlias = "tuple[str, Size, Size]"


PLAIN_TYPES = frozenset({Tensor, Parameter})

# Dtypes of quantized tensors.  Other dtypes smaller than a byte are saved as bytes.
_SUB_BYTE_DTYPES = frozenset({torch.quint4x2, torch.quint2x4})


def shares_bytes(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share bytes: torch cannot copy it or a part of it.

    >>> shares_bytes(torch.ones(2))
    False
    """
    return tensor.dtype in _SUB_BYTE_DTYPES


@dataclass(slots=True)
class ModulePlan:
    """Copies of entries into the tensors of one module, and the errors of the other entries."""

    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def plan_module(
    own: Mapping[str, Tensor],
    entries: Mapping[str, Any],
    prefix: str,
    *,
    skip_mismatched: bool,
    copies: bool,
) -> ModulePlan | None:
    """Return the plan that torch would follow; None if it is more than copying plain tensors.

    `own` are the module's parameters and persistent buffers. With `skip_mismatched`, other shapes
    are left out instead of being errors. With `copies`, entries are copied in the end, so that
    dtypes without a copy in torch are errors.
    """
    plan = ModulePlan()
    for name, target in own.items():
        key = prefix + name
        if key not in entries:
            plan.missing.append(key)
            continue
        source = entries[key]
        if copies_plainly(target, source):
            plan.copies.append((target, source))
        elif not _plan_exception(plan, key, target, source, skip_mismatched):
            if not (copies and are_plain(target, source) and shares_bytes(target)):
                return None
            plan.errors.append(no_copy_message(key, target))
    return plan


def _plan_exception(
    plan: ModulePlan, key: str, target: Tensor, source: Any, skip_mismatched: bool
) -> bool:
    """Plan an entry that is not just copied, as torch does; return False if torch has to do it."""
    if type(target) not in PLAIN_TYPES or is_lazy(target):
        return False
    if not is_tensor_like(source):
        plan.errors.append(no_tensor_message(key, source))
        return True
    if type(source) not in PLAIN_TYPES:
        return False
    if differ(target, source):
        if skip_mismatched:
            plan.mismatched.append((key, source.shape, target.shape))
        else:
            plan.errors.append(mismatch_message(key, target, source))
        return True
    if source.shape != target.shape and copies_plainly(target, source[0]):
        plan.copies.append((target, source[0]))  # a scalar, as torch 0.3 saved it
        return True
    return False


def are_plain(target: Any, source: Any) -> bool:
    """Return whether both are tensors of exactly torch's own types."""
    return type(target) in PLAIN_TYPES and type(source) in PLAIN_TYPES


def differ(target: Tensor, source: Any) -> bool:
    """Return whether torch would report a size mismatch.

    The shape of an uninitialized `source` raises torch's RuntimeError.
    """
    if not is_tensor_like(source) or is_lazy(target):
        return False
    one_element = len(target.shape) == 0 and tuple(source.shape) == (1,)  # as torch 0.3 saved it
    return not one_element and bool(source.shape != target.shape)
