"""Checkpoints of transformers' Trainer with ptsave: a mixin, and a Trainer that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.integrations.lazy_classes import class_over
from ptsave.integrations.trainer import CheckpointMixin

if TYPE_CHECKING:
    from ptsave.integrations.trainer import CheckpointMixin as Trainer

__all__ = ["CheckpointMixin", "Trainer"]

_PARTS: dict[str, type] = {"Trainer": CheckpointMixin}


def __getattr__(name: str) -> Any:
    return class_over(
        __name__, name, _PARTS, "transformers.Trainer", package="transformers accelerate"
    )
