"""Private names of torch.serialization, torch.jit and torch._C, and how its releases differ.

Checked with torch 2.9.1, 2.11.0, 2.13.0 and 2.15.0, which have all of them.  If a name is missing,
`private` raises an ImportError that names it.  Differences are found by looking at torch, not
at its version number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import serialization
from torch.jit import _builtins
from torch.serialization import load, save

from ptsave.support.torch_version import private

__all__ = ["load", "save"]  # torch's own, as they were at import: ptsave hands calls on to these

# Reads a zip archive with torch's C++ code.
ArchiveFileReader: Any = private(torch._C, "PyTorchFileReader")
# Rebuilds the object of an open archive: reader, map_location, pickle_module.
load_archive: Callable[..., Any] = private(serialization, "_load")
# The module that replaces `pickle` for ``weights_only=True``.
restricted_unpickler: Any = private(torch, "_weights_only_unpickler")
allowed_globals: Callable[[], dict[str, Any]]
allowed_globals = private(restricted_unpickler, "_get_allowed_globals")
user_allowed_globals: Callable[[], dict[str, Any]]
user_allowed_globals = private(restricted_unpickler, "_get_user_allowed_globals")
# Modules whose objects torch never builds, whatever the user allows.
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
# (priority, tagger, deserializer) in the order in which torch asks them.
location_rules: list[Any] = private(serialization, "_package_registry")
cpu_rule: Callable[..., Any] = private(serialization, "_cpu_deserialize")
log_api_usage: Callable[[str], None] = private(torch._C, "_log_api_usage_once")
# Takes inputs, or None; returns the mode that makes tensors fake, or None.
detect_fake_mode: Callable[[Any], Any] = private(torch._guards, "detect_fake_mode")

# TorchScript's table of functions that are operators of torch.
register_builtin: Callable[[Any, str], None] = private(_builtins, "_register_builtin")
find_builtin: Callable[[Any], Any] = private(_builtins, "_find_builtin")
builtin_operators: Callable[[], dict[int, Any]] = private(_builtins, "_get_builtin_table")


# The code of torch.load, without its decorators.
_code = getattr(inspect.unwrap(load), "__code__", None)
_names, _constants = (_code.co_names, _code.co_consts) if _code is not None else ((), ())

# From 2.14 on, torch.load(weights_only=True) always validates sparse tensors, with a warning, and
# tells the loader.
LOADER_KNOWS_WEIGHTS_ONLY = "weights_only" in inspect.signature(load_archive).parameters

# From 2.12 on "TRUE" sets TORCH_FORCE_WEIGHTS_ONLY_LOAD as "true" does.
IGNORES_CASE_OF_VARIABLES = "lower" in _names

# From 2.11 on torch.load(weights_only=True) warns of keyword arguments for the unpickler.
WARNS_OF_UNUSED_ARGUMENTS = any("pickle_load_args only works" in str(each) for each in _constants)

# From 2.11 on torch.load(map_location="meta") asks for no bytes, and the storages keep the
# attribute _checkpoint_offset.  Before, it reads storages and moves them.
META_LOADS_KEEP_OFFSETS = hasattr(torch.serialization, "_is_meta_location")
