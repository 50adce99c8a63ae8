"""Checkpoints of ``import lightning`` with ptsave: plug-ins for its Trainer and Fabric."""

from ptsave.integrations.checkpoint_io import AsyncCheckpointIO, CheckpointIO
from ptsave.integrations.lazy_classes import classes_over

__all__ = ["AsyncCheckpointIO", "CheckpointIO"]

_BASE = "lightning.fabric.plugins.io.checkpoint_io.CheckpointIO"
__getattr__ = classes_over(__name__, dict.fromkeys(__all__, _BASE), package="lightning")
