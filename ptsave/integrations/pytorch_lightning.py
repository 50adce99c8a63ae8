"""Checkpoints of ``import pytorch_lightning`` with ptsave: plug-ins for its Trainer and Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.integrations import checkpoint_io
from ptsave.integrations.lazy_classes import class_over

if TYPE_CHECKING:
    from ptsave.integrations.checkpoint_io import AsyncCheckpointIO, CheckpointIO

__all__ = ["AsyncCheckpointIO", "CheckpointIO"]

_BASE = "lightning_fabric.plugins.io.checkpoint_io.CheckpointIO"
_PARTS: dict[str, type] = {
    "AsyncCheckpointIO": checkpoint_io.AsyncCheckpointIO,
    "CheckpointIO": checkpoint_io.CheckpointIO,
}


def __getattr__(name: str) -> Any:
    return class_over(__name__, name, _PARTS, _BASE, package="pytorch-lightning")
