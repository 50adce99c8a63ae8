"""Refuses to go on under a torch of another minor series than ptsave was compiled against."""

import torch

__all__ = ["TORCH_VERSION", "VERSION"]

try:
    from ptsave._torch_build import TORCH_VERSION, VERSION
except ModuleNotFoundError as error:
    raise ImportError(
        "ptsave is not built here: run `make build`, or `pip install --no-build-isolation .`"
    ) from error


def _minor_series(version: str) -> str:
    return ".".join(version.split(".")[:2])


if _minor_series(torch.__version__) != _minor_series(TORCH_VERSION):
    raise ImportError(
        f"this ptsave was built for torch {_minor_series(TORCH_VERSION)} and torch "
        f"{torch.__version__} is installed: rebuild it with `pip install --no-build-isolation --force-reinstall "
        f"--no-deps ptsave`, or install torch=={_minor_series(TORCH_VERSION)}.*"
    )
