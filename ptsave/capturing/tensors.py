"""Statistics of tensors of every kind: strided, sparse, nested, distributed, without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ptsave import _C
from ptsave.support.text import size_text
from ptsave.support.torch_tensors import parts_of_sparse_coo
from ptsave.tree.expansion import default_limit, nbytes_of

__all__ = [
    "PLAIN_TYPES",
    "is_expanded_far",
    "is_freed",
    "keeps_storage",
    "local_values",
    "statistics_of",
    "stored_nbytes",
    "unexpanded",
    "why_no_statistics",
]

PLAIN_TYPES = {Tensor, nn.Parameter, nn.Buffer}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def statistics_of(tensor: Tensor, n_threads: int) -> tuple[Any, ...] | None:
    """Return the fields of `Statistics`, of a strided tensor in CPU memory.

    They are taken by up to `n_threads` of torch's threads.
    None if there are none: `why_no_statistics` says why.
    """
    try:
        return _C.tensor_statistics(tensor, n_threads)
    except TypeError:  # it is not contiguous, or is to be conjugated
        if is_expanded_far(tensor):
            return None
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return _C.tensor_statistics(plain, n_threads)


def why_no_statistics(tensor: Tensor) -> str:
    """Return a note about a tensor whose elements are no numbers, or far too many to be looked at.

    >>> why_no_statistics(torch.zeros(1).expand(1 << 40))
    'expanded to 4.00 TiB: no statistics'
    """
    if is_expanded_far(tensor):
        return f"expanded to {size_text(nbytes_of(tensor))}: no statistics"
    return f"{tensor.dtype}: no statistics"


def is_expanded_far(tensor: Tensor) -> bool:
    """Return whether a strided tensor is far larger than its memory, too large to write in full."""
    return nbytes_of(tensor) > default_limit(stored_nbytes(tensor))


def unexpanded(tensor: Tensor) -> Tensor:
    """Return a strided tensor without the repetitions of the dimensions that are expanded.

    >>> unexpanded(torch.zeros(3, 1).expand(3, 1 << 40)).shape
    torch.Size([3, 1])
    """
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if step else 1) for step in tensor.stride())]


def keeps_storage(tensor: Tensor) -> bool:
    """Return whether a strided tensor is written with its storage, because that has nothing else.

    Not if it is a part of that: then a copy of the part is written.
    """
    return tensor.untyped_storage().nbytes() <= unexpanded(tensor).nbytes


def stored_nbytes(tensor: Tensor) -> int:
    """Return the bytes of the file that a strided tensor takes."""
    return min(tensor.untyped_storage().nbytes(), unexpanded(tensor).nbytes)


def is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's storage was freed below it, as FSDP does."""
    try:
        return tensor.untyped_storage().nbytes() == 0 < tensor.numel()
    except (NotImplementedError, RuntimeError):
        return False


def local_values(tensor: Tensor) -> tuple[Tensor | None, str]:
    """Return a strided tensor with the values that this process has, and a note about it.

    None if there are none, and the note says why.
    """
    if tensor.is_meta:
        return None, "meta: no values"
    if type(tensor) not in PLAIN_TYPES:
        return _values_of_subclass(tensor)
    if tensor.layout == torch.sparse_coo:
        return parts_of_sparse_coo(tensor.detach())[1], "sparse: statistics of the stored values"
    if tensor.layout in _COMPRESSED:
        return tensor.detach().values(), "sparse: statistics of the stored values"
    if tensor.is_nested:
        return tensor.detach().values(), "nested: statistics of all its values"
    if tensor.is_mkldnn:
        return tensor.detach().to_dense(), "mkldnn: as a dense tensor"
    if tensor.is_quantized or tensor.layout != torch.strided:
        return None, f"{'quantized' if tensor.is_quantized else tensor.layout}: no statistics"
    return tensor, ""


def _values_of_subclass(tensor: Tensor) -> tuple[Tensor | None, str]:
    kind = type(tensor).__name__
    if kind in ("FakeTensor", "FunctionalTensor"):
        return None, f"{kind}: no values"
    if kind == "DTensor":
        return tensor.detach().to_local(), "DTensor: this rank's part"  # type: ignore[attr-defined]
    if tensor.is_nested:  # the jagged layout
        return tensor.detach().values(), "nested: statistics of all its values"
    if nn.parameter.is_lazy(tensor):
        return None, "uninitialized: no values"
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if is_plain and tensor.layout == torch.strided and not tensor.is_quantized:
        return tensor.detach().as_subclass(Tensor), f"subclass {kind}: as a plain tensor"
    return None, f"{kind}: no values"  # a file that has it could not be read without its code
