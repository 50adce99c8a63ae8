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


_BUILT_FOR = _minor_series(TORCH_VERSION)

if _minor_series(torch.__version__) != _BUILT_FOR:
    raise ImportError(
        f"this ptsave was built for torch {_BUILT_FOR} and torch {torch.__version__} is installed: "
        "reinstall ptsave with `pip install --no-build-isolation --force-reinstall --no-deps`, "
        f"or install torch=={_BUILT_FOR}.*"
    )
