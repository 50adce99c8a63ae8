"""Loads models of SGLang with ptsave: ``LoadConfig(load_format=ModelLoader)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ptsave.integrations.lazy_classes import classes_over
from ptsave.integrations.vllm import WeightsLoader
from ptsave.models.iterating import iter_weights

__all__ = ["ModelLoader"]


class ModelLoader(WeightsLoader):
    """Loads the weights of an SGLang model with ptsave: ``LoadConfig(load_format=ModelLoader)``.

    It is SGLang's default loader, except that :func:`ptsave.iter_weights` reads the shards.

    Parameters
    ----------
    load_config : sglang.srt.configs.load_config.LoadConfig
        The configuration; ``model_loader_extra_config`` must be empty.

    Raises
    ------
    ValueError
        If ``model_loader_extra_config`` has options.
    """

    def __init__(self, load_config: Any) -> None:
        if load_config.model_loader_extra_config is None:
            load_config.model_loader_extra_config = {}
        super().__init__(load_config)

    def download_model(self, model_config: Any) -> None:
        """Download the model, if it is on the Hugging Face hub."""
        self.local_model(model_config.model_path, model_config.revision)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Tensor]]:
        path = self.local_model(source.model_or_path, source.revision)
        return ((source.prefix + name, tensor) for name, tensor in iter_weights(path))


_BASE = "sglang.srt.model_loader.loader.DefaultModelLoader"
__getattr__ = classes_over(__name__, {"ModelLoader": _BASE}, package="sglang")
