"""Checkpoints of ignite with ptsave: save handlers for its ``Checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.integrations import save_handler
from ptsave.integrations.lazy_classes import class_over

if TYPE_CHECKING:
    from ptsave.integrations.save_handler import AsyncSaveHandler, SaveHandler

__all__ = ["AsyncSaveHandler", "SaveHandler"]

_PARTS: dict[str, type] = {
    "AsyncSaveHandler": save_handler.AsyncSaveHandler,
    "SaveHandler": save_handler.SaveHandler,
}


def __getattr__(name: str) -> Any:
    base = "ignite.handlers.checkpoint.DiskSaver"
    return class_over(__name__, name, _PARTS, base, package="pytorch-ignite")
