"""Loads models of SGLang with ptsave: ``LoadConfig(load_format=ModelLoader)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.integrations.lazy_classes import class_over
from ptsave.integrations.served_weights import DefaultLoaderPart

if TYPE_CHECKING:
    from ptsave.integrations.served_weights import DefaultLoaderPart as ModelLoader

__all__ = ["ModelLoader"]


def __getattr__(name: str) -> Any:
    base = "sglang.srt.model_loader.loader.DefaultModelLoader"
    return class_over(__name__, name, {"ModelLoader": DefaultLoaderPart}, base, package="sglang")
