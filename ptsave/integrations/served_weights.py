"""Finds or downloads weights for inference engines, and reads them ahead in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ptsave.models.iterating import iter_weights
from ptsave.sources.urls import is_url

__all__ = ["DefaultLoaderPart", "ModelLoaderPart", "local_model"]

_SAFETENSORS = ["*.safetensors", "*.safetensors.index.json"]
_OTHERS = ["*.bin", "*.pt", "*.bin.index.json"]


def local_model(
    model: str,
    revision: str | None,
    *,
    download_dir: str | None,
    ignore_patterns: str | list[str] | None,
) -> str:
    """Return the path or URL of a model; download it if it is on the Hugging Face hub."""
    if os.path.exists(model) or is_url(model):
        return model
    from huggingface_hub import snapshot_download

    folder = ""
    for patterns in (_SAFETENSORS, _OTHERS):
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=ignore_patterns,
        )
        suffixes = tuple(each.removeprefix("*") for each in patterns)
        # If no file of the model matches, there is no folder.
        if os.path.isdir(folder) and any(name.endswith(suffixes) for name in os.listdir(folder)):
            break
    return folder


class _Part:
    """Methods that the loaders for both engines share."""

    load_config: Any

    def __init__(self, load_config: Any) -> None:
        options = getattr(load_config, "model_loader_extra_config", None) or {}
        if options:
            raise ValueError(f"the load format ptsave has no extra options, and got {options}")
        super().__init__(load_config)  # type: ignore[call-arg]

    def _local(self, model: str, revision: str | None) -> str:
        return local_model(
            model,
            revision,
            download_dir=getattr(self.load_config, "download_dir", None),
            ignore_patterns=getattr(self.load_config, "ignore_patterns", None),
        )


class ModelLoaderPart(_Part):
    """Loads the weights of a vLLM model with ptsave: ``--load-format ptsave``.

    :func:`ptsave.iter_weights` reads the shards ahead with several threads, in large requests and
    bounded memory.  So no access waits for page faults.

    Parameters
    ----------
    load_config : vllm.config.LoadConfig
        Without ``model_loader_extra_config``.

    Raises
    ------
    ValueError
        If it has such options.
    """

    def download_model(self, model_config: Any) -> None:
        """Download the model, if it is on the hub."""
        self._local(_weights_name(model_config), model_config.revision)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill a model with its weights, by the model's own ``load_weights``."""
        path = self._local(_weights_name(model_config), model_config.revision)
        load_weights: Any = model.load_weights
        load_weights(iter_weights(path))


def _weights_name(model_config: Any) -> str:
    """Return the path or hub name of the weights, which may differ from the model's."""
    return str(getattr(model_config, "model_weights", None) or model_config.model)


class DefaultLoaderPart(_Part):
    """Loads the weights of an SGLang model with ptsave: ``LoadConfig(load_format=ModelLoader)``.

    It is SGLang's default loader, except that :func:`ptsave.iter_weights` reads the shards.

    Parameters
    ----------
    load_config : sglang.srt.configs.load_config.LoadConfig
        Without ``model_loader_extra_config``.

    Raises
    ------
    ValueError
        If it has such options.
    """

    def __init__(self, load_config: Any) -> None:
        if load_config.model_loader_extra_config is None:
            load_config.model_loader_extra_config = {}
        super().__init__(load_config)

    def download_model(self, model_config: Any) -> None:
        """Download the model, if it is on the hub."""
        self._local(model_config.model_path, model_config.revision)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Tensor]]:
        path = self._local(source.model_or_path, source.revision)
        return ((source.prefix + name, tensor) for name, tensor in iter_weights(path))
