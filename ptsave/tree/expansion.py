"""Bounds how much larger tensors may become when each gets memory of its own.

A tensor can be far larger than its storage: one number, expanded to 2**36 elements, is a file of a
KiB, and 256 GiB of safetensors. In the same way, 1,000 views of one storage become 1,000 copies of
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from ptsave.support.sizes import parse_size
from ptsave.support.torch_tensors import storage_id

_MIN_LIMIT_NBYTES = 1 << 30
_MAX_FACTOR = 8

# For operations without such an option: their input can be written in full first.
ADVICE = "if that is meant, write it in full first: ptsave convert --max-size"


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes that a tensor's elements take when each is written."""
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
    """Return how many bytes tensors may take in full if their storages take `stored_nbytes`.

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
    """Raise ValueError if tensors take much more when each is written in full than they do now.

    The limit is `max_size`, such as ``"300GB"``.  By default it is 8 times the bytes of the
    storages, and at least 1 GiB.  No values are looked at.

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
