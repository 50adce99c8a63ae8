"""Computes statistics of tensors of all kinds, such as sparse, nested and distributed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ptsave import _C
from ptsave.support.text import size_text
from ptsave.support.torch_names import parts_of_sparse_coo
from ptsave.tree.extents import default_limit, nbytes_of

PLAIN_TYPES = {Tensor, nn.Parameter, nn.Buffer}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def statistics_of(tensor: Tensor, n_threads: int) -> tuple[Any, ...] | None:
    """Return the fields of `Statistics` for a strided tensor in CPU memory.

    Uses up to `n_threads` of torch's threads.  Returns None if the tensor has no statistics;
    `why_no_statistics` returns the reason.
    """
    try:
        return _C.tensor_statistics(tensor, n_threads)
    except TypeError:  # not contiguous, or with a conjugate or negative bit
        if is_expanded_far(tensor):
            return None
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return _C.tensor_statistics(plain, n_threads)


def why_no_statistics(tensor: Tensor) -> str:
    """Return why a tensor has no statistics: it has no numbers, or far too many elements.

    >>> why_no_statistics(torch.zeros(1).expand(1 << 40))
    'expanded to 4.00 TiB: no statistics'
    """
    if is_expanded_far(tensor):
        return f"expanded to {size_text(nbytes_of(tensor))}: no statistics"
    return f"{tensor.dtype}: no statistics"


def is_expanded_far(tensor: Tensor) -> bool:
    """Return whether an expanded strided tensor, written in full, exceeds the default limit."""
    return nbytes_of(tensor) > default_limit(stored_nbytes(tensor))


def unexpanded(tensor: Tensor) -> Tensor:
    """Return a strided tensor without the repetitions of its expanded dimensions.

    >>> unexpanded(torch.zeros(3, 1).expand(3, 1 << 40)).shape
    torch.Size([3, 1])
    """
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if step else 1) for step in tensor.stride())]


def keeps_storage(tensor: Tensor) -> bool:
    """Return whether a strided tensor fills its storage; if not, a contiguous copy is written."""
    return tensor.untyped_storage().nbytes() <= unexpanded(tensor).nbytes


def stored_nbytes(tensor: Tensor) -> int:
    """Return the bytes that a strided tensor takes in the file."""
    return min(tensor.untyped_storage().nbytes(), unexpanded(tensor).nbytes)


def is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's storage was freed while the tensor exists (FSDP does this)."""
    try:
        return tensor.untyped_storage().nbytes() == 0 < tensor.numel()
    except (NotImplementedError, RuntimeError):
        return False


def local_values(tensor: Tensor) -> tuple[Tensor | None, str]:
    """Return a tensor's local values as a strided tensor, or None if impossible, and a note."""
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
    return None, f"{kind}: no values"  # to load such a tensor, a program would need its class
