"""The private names of torch.distributed.checkpoint, whose import takes a second.

Only modules that are imported for such a checkpoint may import this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import _nested_dict, _storage_utils, filesystem, metadata

from ptsave.support.torch_version import private

__all__ = [
    "MemoryFormat",
    "StorageInfo",
    "flatten_state_dict",
    "layout_function",
    "rebuild_tensor",
    "rebuild_tensor_of_dtype",
    "storage_setup_module",
]

# Where the bytes of an item are: relative_path, offset, length, transform_descriptors.
StorageInfo: Any = private(filesystem, "_StorageInfo")
MemoryFormat: Any = private(metadata, "_MEM_FORMAT_ENCODING")

# Returns a flat dict, and the path of each of its names in the nested one.
flatten_state_dict: Any = _nested_dict.flatten_state_dict

# The function of torch.serialization that pickles name for a torch.layout.
layout_function = "_get_layout"

# Called by pickles for a tensor; the second where no class of storages has its dtype.
rebuild_tensor: Any = private(torch._utils, "_rebuild_tensor_v2")
rebuild_tensor_of_dtype: Any = private(torch._utils, "_rebuild_tensor_v3")

# The module that finds a storage for a checkpoint_id, by names of its own.
storage_setup_module = _storage_utils
