"""Private names of torch and its tensors, storages and files, and how its releases differ.

The import of this module fails if ptsave has no compiled extension for the installed torch.  torch
2.9.1, 2.11.0, 2.13.0 and 2.15.0 have all names; `private` raises an ImportError for a missing name.
To detect how a release differs, ptsave looks at torch's code, not at the version number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, serialization
from torch.jit import _builtins
from torch.nn import Parameter
from torch.serialization import load, save

from ptsave._built import VERSION
from ptsave.engines import choice

__all__ = ["VERSION", "load", "save"]  # imported names that other modules import from here

choice.require()


def private(owner: Any, name: str) -> Any:
    """Return the attribute `name` of `owner`, a part of torch, or raise an ImportError."""
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", None) or type(owner).__name__
        raise ImportError(
            f"torch {torch.__version__} has no {where}.{name}, which ptsave {VERSION} uses: "
            "install another release of ptsave, or a torch that ptsave's documentation lists"
        ) from None


_storage = torch.UntypedStorage(0)

# The address of a storage's C++ object.  Python objects of the same storage have the same address.
storage_id: Callable[[Any], int] = attrgetter("_cdata")
private(_storage, "_cdata")

# Private functions for a TypedStorage; its public methods issue warnings.
untyped_of: Callable[[Any], torch.UntypedStorage] = attrgetter("_untyped_storage")
numel_of_typed: Callable[[Any], int] = methodcaller("_size")
storage_type_name: Callable[[Any], str] = methodcaller("_pickle_storage_type")
private(torch.TypedStorage, "_size")
private(torch.TypedStorage, "_pickle_storage_type")

make_subclass: Callable[[type, Tensor, bool], Any] = private(Tensor, "_make_subclass")
negated_view: Callable[[Tensor], Tensor] = private(torch, "_neg_view")
# Whether elements of a tensor overlap: 0 for no, 1 for yes, 2 for unknown.
has_internal_overlap: Callable[[Tensor], int] = private(torch, "_debug_has_internal_overlap")
set_grad_enabled: Callable[[bool], None] = private(torch._C, "_set_grad_enabled")
n_values_of_sparse: Callable[[Tensor], int] = methodcaller("_nnz")
private(Tensor, "_nnz")
_n_dispatch_modes: Callable[[], int] = private(torch._C, "_len_torch_dispatch_stack")
_n_function_modes: Callable[[], int] = private(torch._C, "_len_torch_function_stack")
_transforms: Any = private(torch._C, "_functorch")
# An attribute of storages on the meta device: the position of the storage's bytes in the file.
CHECKPOINT_OFFSET = "_checkpoint_offset"


def storage_id_of(tensor: Tensor) -> int | None:
    """Return the `storage_id` of a tensor's storage; None if the tensor has no storage."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors
        return None


def modes_are_active() -> bool:
    """Return whether a torch mode or a functorch transform intercepts calls of torch functions."""
    return bool(
        _n_dispatch_modes()
        or _n_function_modes()
        or _transforms.peek_interpreter_stack() is not None
    )


def parts_of_sparse_coo(tensor: Tensor) -> list[Tensor]:
    """Return the indices and values of a COO tensor, which need not be coalesced."""
    return [tensor._indices(), tensor._values()]


_PLAIN_TYPES = (Tensor, Parameter)


def is_distributed_tensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor (each rank then has a part of it)."""
    if type(tensor) in _PLAIN_TYPES:  # `hasattr` is slow for these
        return False
    # torch.distributed.checkpoint also asks for this attribute.  Importing DTensor takes a second.
    return hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "to_local")


def local_part_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a DTensor, and its offsets; a plain tensor is returned whole."""
    if not is_distributed_tensor(tensor):
        return tensor, (0,) * tensor.dim()
    distributed: Any = tensor
    chunks = distributed.__create_chunk_list__()
    local: Tensor = distributed.detach().to_local()
    if not chunks:
        return local, (0,) * local.dim()
    if len(chunks) > 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise RuntimeError(f"a DTensor with placements {distributed.placements} is not one block")
    return local, tuple(chunks[0].offsets)


# Reads a zip archive with torch's C++ code.
ArchiveFileReader: Any = private(torch._C, "PyTorchFileReader")
# Rebuilds the object in an archive.  Arguments: reader, map_location, pickle_module.
load_archive: Callable[..., Any] = private(serialization, "_load")
# The module that replaces `pickle` for ``weights_only=True``.
restricted_unpickler: Any = private(torch, "_weights_only_unpickler")
allowed_globals: Callable[[], dict[str, Any]]
allowed_globals = private(restricted_unpickler, "_get_allowed_globals")
user_allowed_globals: Callable[[], dict[str, Any]]
user_allowed_globals = private(restricted_unpickler, "_get_user_allowed_globals")
# Modules whose objects torch never builds, even if the user allows them.
blocked_modules: list[str] = private(restricted_unpickler, "_blocklisted_modules")

# This thread's `skip_data` and `map_location`.
options: Any = private(serialization, "_serialization_tls")
check_dill_version: Callable[[Any], None] = private(serialization, "_check_dill_version")
check_save_filelike: Callable[[Any], None] = private(serialization, "_check_save_filelike")
defaults_to_weights_only: Callable[[Any], bool]
defaults_to_weights_only = private(serialization, "_default_to_weights_only")
storage_alignment: Callable[[], int] = private(serialization, "_get_storage_alignment")
# Turns a `map_location` into a function of storage and location.
restore_location: Callable[[Any], Callable[..., Any]]
restore_location = private(serialization, "_get_restore_location")
# (priority, tagger, deserializer) in the order in which torch tries them.
location_rules: list[Any] = private(serialization, "_package_registry")
cpu_rule: Callable[..., Any] = private(serialization, "_cpu_deserialize")
log_api_usage: Callable[[str], None] = private(torch._C, "_log_api_usage_once")
# Returns the active FakeTensorMode, or None.  The argument is a list of inputs, or None.
detect_fake_mode: Callable[[Any], Any] = private(torch._guards, "detect_fake_mode")

# TorchScript's table of the Python functions that it compiles to operators.
register_builtin: Callable[[Any, str], None] = private(_builtins, "_register_builtin")
find_builtin: Callable[[Any], Any] = private(_builtins, "_find_builtin")
builtin_operators: Callable[[], dict[int, Any]] = private(_builtins, "_get_builtin_table")


# The code of torch.load, without its decorators.
_code = getattr(inspect.unwrap(load), "__code__", None)
_names, _constants = (_code.co_names, _code.co_consts) if _code is not None else ((), ())

# From 2.14 on, torch.load passes weights_only to `load_archive`.  With weights_only=True it always
# validates sparse tensors, with a warning.
LOADER_KNOWS_WEIGHTS_ONLY = "weights_only" in inspect.signature(load_archive).parameters

# From 2.12 on, TORCH_FORCE_WEIGHTS_ONLY_LOAD accepts "TRUE" as well as "true".
IGNORES_CASE_OF_VARIABLES = "lower" in _names

# From 2.11 on, torch.load(weights_only=True) warns about keyword arguments for the unpickler.
WARNS_OF_UNUSED_ARGUMENTS = any("pickle_load_args only works" in str(each) for each in _constants)

# From 2.11 on, torch.load(map_location="meta") reads no bytes, and the storages keep the attribute
# _checkpoint_offset.  Earlier releases read the storages, and then move the storages.
META_LOADS_KEEP_OFFSETS = hasattr(torch.serialization, "_is_meta_location")
