"""Loads models of SGLang with ptsave: ``LoadConfig(load_format=ModelLoader)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ptsave.integrations.lazy_classes import classes_over
from ptsave.integrations.vllm import WeightsLoader

__all__ = ["ModelLoader"]


class ModelLoader(WeightsLoader):
    """Loads the weights of an SGLang model with ptsave: ``LoadConfig(load_format=ModelLoader)``.

    It is SGLang's default loader, except that :func:`ptsave.iter_weights` reads the shards.  The
    model's path may be that of a directory of versions (:mod:`ptsave.deltas`), or of one version.

    Parameters
    ----------
    load_config : sglang.srt.configs.load_config.LoadConfig
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
        self.local_model(model_config.model_path, model_config.revision)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Tensor]]:
        weights = self.weights(source.model_or_path, source.revision)
        return ((source.prefix + name, tensor) for name, tensor in weights)


_BASE = "sglang.srt.model_loader.loader.DefaultModelLoader"
__getattr__ = classes_over(__name__, {"ModelLoader": _BASE}, package="sglang")
