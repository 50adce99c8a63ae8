"""Private names of torch.distributed.checkpoint, whose import takes a second.

Only modules that are imported for such a checkpoint may import this module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint import (
    _nested_dict,
    _storage_utils,
    default_planner,
    filesystem,
    metadata,
    planner_helpers,
    state_dict_loader,
    state_dict_saver,
    utils,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ptsave.support.torch_names import private

# Where the bytes of an item are: relative_path, offset, length, transform_descriptors.
StorageInfo: Any = private(filesystem, "_StorageInfo")
MemoryFormat: Any = private(metadata, "_MEM_FORMAT_ENCODING")

# A tensor spread over ranks, from before DTensor.
ShardedTensor: Any = private(sharded_tensor, "ShardedTensor")

# Replaces tensors on the device "meta" by tensors with memory.
init_state_dict: Any = private(planner_helpers, "_init_state_dict")

_validate_global_plan: Any = private(default_planner, "_validate_global_plan")

# Returns a flat dict, and the path of each of its names in the nested one.
flatten_state_dict: Any = _nested_dict.flatten_state_dict

# The function of torch.serialization that pickles name for a torch.layout.
layout_function = "_get_layout"

# Pickles call these for a tensor; the second if no storage class has its dtype.
rebuild_tensor: Any = private(torch._utils, "_rebuild_tensor_v2")
rebuild_tensor_of_dtype: Any = private(torch._utils, "_rebuild_tensor_v3")

# The module that finds a storage for a checkpoint_id, by classes among its own globals.
storage_setup_module = _storage_utils

# save() and load() set up their storage, make a DistWrapper of the group, and call these.
save_state_dict: Any = private(state_dict_saver, "_save_state_dict")
load_state_dict: Any = private(state_dict_loader, "_load_state_dict")
DistWrapper: Any = private(utils, "_DistWrapper")


def validate_global_plan(plans: list[SavePlan], described: Metadata) -> list[str]:
    """Return messages about tensors whose chunks overlap or leave something out.

    torch 2.9 logs the messages, and returns whether the plan is valid.
    """
    found: bool | list[str] = _validate_global_plan(plans, described)
    if isinstance(found, bool):
        return [] if found else ["chunks overlap or leave something out, as torch has logged"]
    return found
