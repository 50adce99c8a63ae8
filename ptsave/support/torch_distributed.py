"""Distributed tensors and process groups, without imports that take a second."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN_TYPES = (Tensor, Parameter)


def is_distributed_tensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, so that each rank has a part of it."""
    if type(tensor) in _PLAIN_TYPES:  # `hasattr` is slow for these
        return False
    # The attribute that torch.distributed.checkpoint asks for; importing the class takes a second.
    return hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "to_local")


def local_part_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and the index at which it begins in each dimension.

    The part of a tensor that is no DTensor is the tensor.
    """
    if not is_distributed_tensor(tensor):
        return tensor, (0,) * tensor.dim()
    distributed: Any = tensor
    chunks = distributed.__create_chunk_list__()
    local: Tensor = distributed.detach().to_local()
    if not chunks:
        return local, (0,) * local.dim()
    if len(chunks) > 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise RuntimeError(f"a DTensor of placements {distributed.placements} is not one block")
    return local, tuple(chunks[0].offsets)


def device_of_group(group: Any) -> torch.device:
    """Return the device on which a process group exchanges tensors: the CPU if it can.

    Raises a RuntimeError if this process has no such device.
    """
    kinds = [device.type for device in group._device_types]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    try:
        return torch.empty(0, device=kinds[0]).device  # the current device of that kind
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RuntimeError(
            f"process_group exchanges tensors on devices of type {kinds[0]}, and this process "
            "cannot make one there: make a group that can use the CPU, "
            f'torch.distributed.new_group(backend="gloo"), and pass that ({error})'
        ) from error


def timeout_of_group(group: Any) -> timedelta | None:
    """Return how long a process group waits for its ranks; None if it does not say."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None
