"""Checkpoints of DeepSpeed with ptsave: a checkpoint engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.integrations import checkpoint_engine
from ptsave.integrations.lazy_classes import class_over

if TYPE_CHECKING:
    from ptsave.integrations.checkpoint_engine import CheckpointEngine

__all__ = ["CheckpointEngine"]

_PARTS: dict[str, type] = {"CheckpointEngine": checkpoint_engine.CheckpointEngine}


def __getattr__(name: str) -> Any:
    base = "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine"
    return class_over(__name__, name, _PARTS, base, package="deepspeed")
