"""Storage for torch_checkpointing by ptsave: ``StorageConfig()`` in the place of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.integrations import engine_storage
from ptsave.integrations.lazy_classes import class_over

if TYPE_CHECKING:
    from ptsave.integrations.engine_storage import Storage, StorageConfig

__all__ = ["Storage", "StorageConfig"]

_PARTS: dict[str, type] = {
    "Storage": engine_storage.Storage,
    "StorageConfig": engine_storage.StorageConfig,
}


def __getattr__(name: str) -> Any:
    base = f"torch_checkpointing.storage.base_storage.{name}"
    return class_over(__name__, name, _PARTS, base, package="torch_checkpointing")
