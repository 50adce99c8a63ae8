"""Storage and resharding with ptsave for torch_checkpointing, in place of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.integrations import engine_resharding, engine_storage
from ptsave.integrations.lazy_classes import class_over

if TYPE_CHECKING:
    from ptsave.integrations.engine_resharding import Resharder
    from ptsave.integrations.engine_storage import Storage, StorageConfig

__all__ = ["Resharder", "Storage", "StorageConfig"]

_PARTS: dict[str, type] = {
    "Resharder": engine_resharding.Resharder,
    "Storage": engine_storage.Storage,
    "StorageConfig": engine_storage.StorageConfig,
}


def __getattr__(name: str) -> Any:
    home = "storage.base_storage" if name != "Resharder" else "default_resharder"
    base = f"torch_checkpointing.{home}.{'Default' if name == 'Resharder' else ''}{name}"
    return class_over(__name__, name, _PARTS, base, package="torch_checkpointing")
