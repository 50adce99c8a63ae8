"""Loads models of vLLM with ptsave: ``vllm serve MODEL --load-format ptsave``.

vLLM calls `register` in each process, because ptsave has an entry point in
``vllm.general_plugins``.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ptsave.deltas.versions import newest_in, number_of
from ptsave.deltas.weights import Weights
from ptsave.integrations.lazy_classes import classes_over
from ptsave.models.iterating import iter_weights
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import folder_at

__all__ = ["ModelLoader", "register"]

_SAFETENSORS = ["*.safetensors", "*.safetensors.index.json"]
_OTHERS = ["*.bin", "*.pt", "*.bin.index.json"]


class WeightsLoader:
    """The methods that vLLM's and SGLang's loaders share."""

    load_config: Any

    def __init__(self, load_config: Any) -> None:
        options = dict(getattr(load_config, "model_loader_extra_config", None) or {})
        self._versions, self._base = options.pop("versions", None), options.pop("base", None)
        if options:
            raise ValueError(
                f"the load format ptsave has only the extra options versions and base: {options}"
            )
        load_config = copy.copy(load_config)  # SGLang's loader refuses options that it lacks
        load_config.model_loader_extra_config = {}
        super().__init__(load_config)  # type: ignore[call-arg]

    def weights(self, model: str, revision: str | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a model, or of a version in a directory of versions."""
        if number_of(model) is not None:
            return iter_weights(self._version(model, self._base))
        path = self.local_model(model, revision)
        if self._versions is not None:
            return iter_weights(self._version(self._versions, self._base or path))
        folder = folder_at(path)
        has_versions = folder is not None and newest_in(folder) is not None
        return iter_weights(self._version(path, self._base) if has_versions else path)

    def _version(self, path: str, base: str | None) -> Weights:
        """Return the version at `path`: the path of one version, or of their directory."""
        version = number_of(path)
        if version is not None:
            return Weights(os.path.dirname(path.rstrip("/")), base, version)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                f"{path} has several versions, and each rank would choose the newest one that it "
                f"finds: pass the path of one version, such as {path}/weight_v000012"
            )
        return Weights(path, base)

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
        The configuration.  ``model_loader_extra_config`` may have ``versions``, the path of a
        directory of versions or of one version, and ``base``, the files that they begin with.

    Raises
    ------
    ValueError
        If ``model_loader_extra_config`` has other options.  If there are several ranks, and a
        directory of versions is given instead of one version.
    """

    def download_model(self, model_config: Any) -> None:
        """Download the model, if it is on the Hugging Face hub."""
        self.local_model(_name_of(model_config), model_config.revision)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield a model's weights; vLLM's ``reload_weights`` passes them to the model."""
        return self.weights(_name_of(model_config), model_config.revision)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Read a model's weights, and pass them to the model's own ``load_weights``."""
        load_weights: Any = model.load_weights
        load_weights(self.get_all_weights(model_config, model))


def _name_of(model_config: Any) -> str:
    """Return the name or path of the weights, which may differ from that of the model."""
    name = str(model_config.model)
    if number_of(name) is not None:  # from reload_weights
        return name
    return str(getattr(model_config, "model_weights", None) or name)


def register() -> None:
    """Make ``ptsave`` a load format of vLLM; vLLM may call it several times."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    loaders.register_model_loader("ptsave")(__getattr__("ModelLoader"))


_BASE = "vllm.model_executor.model_loader.base_loader.BaseModelLoader"
__getattr__ = classes_over(__name__, {"ModelLoader": _BASE}, package="vllm")
