"""Private names of torch.distributed.checkpoint, whose import takes a second.

Only modules that ptsave imports for distributed checkpoints may import this module.
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

# Says where a tensor's bytes are in a file: relative_path, offset, length, transform_descriptors.
StorageInfo: Any = private(filesystem, "_StorageInfo")
MemoryFormat: Any = private(metadata, "_MEM_FORMAT_ENCODING")

# A tensor with parts on several ranks: the older form of a DTensor.
ShardedTensor: Any = private(sharded_tensor, "ShardedTensor")

# Replaces tensors on the device "meta" with tensors that have memory.
init_state_dict: Any = private(planner_helpers, "_init_state_dict")

_validate_global_plan: Any = private(default_planner, "_validate_global_plan")

# Returns a flat dict, and for each of its names the path in the nested dict.
flatten_state_dict: Any = _nested_dict.flatten_state_dict

# A pickled torch.layout names this function of torch.serialization.
layout_function = "_get_layout"

# To rebuild a tensor, a pickle calls the first function, or the second for newer dtypes.
rebuild_tensor: Any = private(torch._utils, "_rebuild_tensor_v2")
rebuild_tensor_of_dtype: Any = private(torch._utils, "_rebuild_tensor_v3")

# The module that chooses a reader or writer class for a checkpoint_id; it has both as globals.
storage_setup_module = _storage_utils

# torch's save() and load() make a DistWrapper of the process group, and then call these functions.
save_state_dict: Any = private(state_dict_saver, "_save_state_dict")
load_state_dict: Any = private(state_dict_loader, "_load_state_dict")
DistWrapper: Any = private(utils, "_DistWrapper")


def validate_global_plan(plans: list[SavePlan], described: Metadata) -> list[str]:
    """Return messages about tensors whose chunks overlap or leave gaps.

    torch 2.9 only logs the messages; the result is then one general message.
    """
    found: bool | list[str] = _validate_global_plan(plans, described)
    if isinstance(found, bool):
        return [] if found else ["chunks overlap or leave gaps, as torch has logged"]
    return found
