"""Loads models of vLLM with ptsave: ``vllm serve MODEL --load-format ptsave``.

vLLM calls `register` in each process, by the package's entry point in ``vllm.general_plugins``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ptsave.integrations.lazy_classes import class_over
from ptsave.integrations.served_weights import ModelLoaderPart

if TYPE_CHECKING:
    from ptsave.integrations.served_weights import ModelLoaderPart as ModelLoader

__all__ = ["ModelLoader", "register"]


def register() -> None:
    """Make ``ptsave`` a load format of vLLM; vLLM may call it several times."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    loaders.register_model_loader("ptsave")(__getattr__("ModelLoader"))


def __getattr__(name: str) -> Any:
    base = "vllm.model_executor.model_loader.base_loader.BaseModelLoader"
    return class_over(__name__, name, {"ModelLoader": ModelLoaderPart}, base, package="vllm")
