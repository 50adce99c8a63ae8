"""Loads models of vLLM with ptsave: ``vllm serve MODEL --load-format ptsave``.

vLLM calls `register` in each process, because ptsave has an entry point in
``vllm.general_plugins``.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from torch import nn

from ptsave.integrations.lazy_classes import classes_over
from ptsave.models.iterating import iter_weights
from ptsave.sources.locations import is_url

__all__ = ["ModelLoader", "register"]

_SAFETENSORS = ["*.safetensors", "*.safetensors.index.json"]
_OTHERS = ["*.bin", "*.pt", "*.bin.index.json"]


class WeightsLoader:
    """The methods that vLLM's and SGLang's loaders share."""

    load_config: Any

    def __init__(self, load_config: Any) -> None:
        options = getattr(load_config, "model_loader_extra_config", None) or {}
        if options:
            raise ValueError(f"the load format ptsave has no extra options, but got {options}")
        super().__init__(load_config)  # type: ignore[call-arg]

    def local_model(self, model: str, revision: str | None) -> str:
        """Return the path or URL of a model; download it if it is on the Hugging Face hub."""
        if os.path.exists(model) or is_url(model):
            return model
        from huggingface_hub import snapshot_download

        folder = ""
        for patterns in (_SAFETENSORS, _OTHERS):
            folder = snapshot_download(
                model,
                revision=revision,
                cache_dir=getattr(self.load_config, "download_dir", None),
                allow_patterns=patterns,
                ignore_patterns=getattr(self.load_config, "ignore_patterns", None),
            )
            suffixes = tuple(each.removeprefix("*") for each in patterns)
            # If no file of the model matches, the folder does not exist.
            names = os.listdir(folder) if os.path.isdir(folder) else []
            if any(name.endswith(suffixes) for name in names):
                break
        return folder


class ModelLoader(WeightsLoader):
    """Loads the weights of a vLLM model with ptsave: ``--load-format ptsave``.

    :func:`ptsave.iter_weights` reads the shards ahead with several threads, in large requests, and
    within a limit of memory.  So page faults do not delay the model.

    Parameters
    ----------
    load_config : vllm.config.LoadConfig
        The configuration; ``model_loader_extra_config`` must be empty.

    Raises
    ------
    ValueError
        If ``model_loader_extra_config`` has options.
    """

    def download_model(self, model_config: Any) -> str:
        """Return the path or URL of a model; download it if it is on the Hugging Face hub."""
        # The weights may have another path or name than the model.
        name = getattr(model_config, "model_weights", None) or model_config.model
        return self.local_model(str(name), model_config.revision)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Read a model's weights, and pass them to the model's own ``load_weights``."""
        load_weights: Any = model.load_weights
        load_weights(iter_weights(self.download_model(model_config)))


def register() -> None:
    """Make ``ptsave`` a load format of vLLM; vLLM may call it several times."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    loaders.register_model_loader("ptsave")(__getattr__("ModelLoader"))


_BASE = "vllm.model_executor.model_loader.base_loader.BaseModelLoader"
__getattr__ = classes_over(__name__, {"ModelLoader": _BASE}, package="vllm")
