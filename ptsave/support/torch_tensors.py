"""Private names of torch's tensors and storages.

Checked with torch 2.9.1, 2.11.0 and 2.13.0, which have all of them.  If a name is missing,
`private` raises an ImportError that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from ptsave.support.torch_version import private

_storage = torch.UntypedStorage(0)

# The address of the C++ object: equal for all Python objects of a storage while it lives.
storage_id: Callable[[Any], int] = attrgetter("_cdata")
private(_storage, "_cdata")

# For a TypedStorage, whose public methods warn.
untyped_of: Callable[[Any], torch.UntypedStorage] = attrgetter("_untyped_storage")
numel_of_typed: Callable[[Any], int] = methodcaller("_size")
storage_type_name: Callable[[Any], str] = methodcaller("_pickle_storage_type")
private(torch.TypedStorage, "_size")
private(torch.TypedStorage, "_pickle_storage_type")

make_subclass: Callable[[type, Tensor, bool], Any] = private(Tensor, "_make_subclass")
negated_view: Callable[[Tensor], Tensor] = private(torch, "_neg_view")
# 0: no, 1: yes, 2: too hard to say.
has_internal_overlap: Callable[[Tensor], int] = private(torch, "_debug_has_internal_overlap")
set_grad_enabled: Callable[[bool], None] = private(torch._C, "_set_grad_enabled")
n_values_of_sparse: Callable[[Tensor], int] = methodcaller("_nnz")
private(Tensor, "_nnz")
_n_dispatch_modes: Callable[[], int] = private(torch._C, "_len_torch_dispatch_stack")
_n_function_modes: Callable[[], int] = private(torch._C, "_len_torch_function_stack")
_transforms: Any = private(torch._C, "_functorch")
# An attribute of storages on the meta device: the storage's position in the file.
CHECKPOINT_OFFSET = "_checkpoint_offset"


def storage_id_of(tensor: Tensor) -> int | None:
    """Return the `storage_id` of a tensor's storage; None if it has none of its own."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors
        return None


def modes_are_active() -> bool:
    """Return whether a mode or a transform sees every call of torch first."""
    return bool(
        _n_dispatch_modes()
        or _n_function_modes()
        or _transforms.peek_interpreter_stack() is not None
    )


def parts_of_sparse_coo(tensor: Tensor) -> list[Tensor]:
    """Return indices and values of a COO tensor, coalesced or not."""
    return [tensor._indices(), tensor._values()]
