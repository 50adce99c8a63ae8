"""Recognizes tensors that are nothing but numbers in memory: copying them runs nobody's code.

Loading a state dict may copy those by itself, at any time; everything else is torch's to decide.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave.support.torch_tensors import (
    dispatch_keys_of,
    has_internal_overlap,
    is_alias_of,
    names_of_keys,
)

__all__ = ["PLAIN_TYPES", "copies_plainly", "shares_bytes"]

PLAIN_TYPES = frozenset({Tensor, Parameter})

_DEVICES = ("CPU", "CUDA", "MPS", "XPU")
# Between these `copy_` converts without a word, but for complex numbers that lose their imaginary
# part.
_COMPLEX_DTYPES = frozenset({torch.complex32, torch.complex64, torch.complex128})
_REAL_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    }
)
# Those of which torch makes quantized tensors; others smaller than a byte are saved as bytes.
_SUB_BYTE_DTYPES = frozenset({torch.quint4x2, torch.quint2x4})


def shares_bytes(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share bytes: torch can copy no such tensor, nor a part.

    >>> shares_bytes(torch.ones(2))
    False
    """
    return tensor.dtype in _SUB_BYTE_DTYPES


def copies_plainly(target: Any, source: Any) -> bool:
    """Return whether ``target.copy_(source)`` moves numbers and can neither fail nor warn.

    Parameters
    ----------
    target, source : object
        A module's and a state dict's values under one key.  Anything but two tensors of exactly
        torch's own types, strided, of one shape and on real devices, is not copied plainly.
    """
    if type(target) not in PLAIN_TYPES or type(source) not in PLAIN_TYPES:
        return False
    # A tensor made in inference mode has no autograd keys; as a source it needs none.
    if (
        not (_is_memory(target) and _is_memory(source, source.is_inference()))
        or target.shape != source.shape
    ):
        return False
    # copy_ refuses to write to one place twice, and to read bytes that it overwrites.
    if not target.is_contiguous() and has_internal_overlap(target) == 1:
        return False
    if target is not source and is_alias_of(target, source):
        return False
    return target.dtype is source.dtype or _converts_silently(source.dtype, target.dtype)


def _converts_silently(source: torch.dtype, target: torch.dtype) -> bool:
    if source in _REAL_DTYPES:
        return target in _REAL_DTYPES or target in _COMPLEX_DTYPES
    return source in _COMPLEX_DTYPES and target in _COMPLEX_DTYPES


def _is_memory(tensor: Tensor, is_inference: bool = False) -> bool:
    return _names_memory(dispatch_keys_of(tensor), is_inference)


@functools.cache
def _names_memory(dispatch_keys: int, is_inference: bool) -> bool:
    """Return whether tensors with these dispatch keys are strided numbers on a real device.

    Every other kind has a key that says so: sparse, quantized and nested tensors, meta tensors,
    conjugates that are not computed yet, inference tensors (by a key that they lack), wrappers.
    """
    names = names_of_keys(dispatch_keys)
    return any(
        ({device} if is_inference else {device, "ADInplaceOrView", f"Autograd{device}"})
        <= names
        <= {device, "ADInplaceOrView", f"Autograd{device}", f"Autocast{device}"}
        for device in _DEVICES
    )
