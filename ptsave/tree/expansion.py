"""Bounds how much larger tensors may become when each gets memory of its own.

A tensor can be far larger than its storage: one number, expanded to 2**36 elements, is a file of a
KiB and 256 GiB of safetensors; so are 1,000 views of one storage 1,000 copies of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from ptsave.support.sizes import parse_size
from ptsave.support.torch_tensors import storage_id

__all__ = ["ADVICE", "check_expansion", "default_limit", "nbytes_of", "stored_nbytes_of"]

_MIN_LIMIT_NBYTES = 1 << 30
_MAX_FACTOR = 8

# For operations without such an option, whose input can be written in full first.
ADVICE = "if that is meant, write it in full first: ptsave convert --max-size"


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements when each is written."""
    return prod(tensor.shape) * tensor.itemsize


def stored_nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    storages = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages[storage_id(storage)] = storage.nbytes()
    return sum(storages.values())


def default_limit(stored_nbytes: int) -> int:
    """Return how many bytes tensors may take in full whose storages take so many.

    Examples
    --------
    >>> default_limit(4), default_limit(10**10)
    (1073741824, 80000000000)
    """
    return max(_MIN_LIMIT_NBYTES, _MAX_FACTOR * stored_nbytes)


def check_expansion(
    tensors: Iterable[Tensor],
    path: str,
    *,
    max_size: int | str | None = None,
    advice: str = "if that is meant, pass --max-size (max_size=)",
) -> None:
    """Refuse tensors that take much more when each is written in full than they do now.

    Parameters
    ----------
    tensors : iterable of torch.Tensor
        All that are to be written; their values are not looked at.
    path : str
        The file they are from, for messages.
    max_size : int or str, optional
        Bytes that they may take, such as ``"300GB"``; by default 8 times those of their
        storages, at least 1 GiB.
    advice : str, optional
        A remedy, for the message.

    Raises
    ------
    ValueError
        If they take more.

    Examples
    --------
    >>> check_expansion([torch.zeros(3, 1).expand(3, 1000)], "mask.pt")
    >>> check_expansion([torch.zeros(1).expand(1 << 36)], "bomb.pt")
    Traceback (most recent call last):
    ValueError: bomb.pt: its tensors take 274,877,906,944 bytes when each is written in full, more \
than 1,073,741,824, because they are expanded or share memory: if that is meant, pass --max-size \
(max_size=)
    """
    tensors = list(tensors)
    if max_size is None:
        limit = default_limit(stored_nbytes_of(tensors))
    else:
        limit = parse_size(max_size, "max_size")
    nbytes = sum(map(nbytes_of, tensors))
    if nbytes > limit:
        raise ValueError(
            f"{path}: its tensors take {nbytes:,} bytes when each is written in full, more than "
            f"{limit:,}, because they are expanded or share memory: {advice}"
        )
