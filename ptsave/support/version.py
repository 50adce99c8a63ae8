"""The version of ptsave, and that of the torch that it was compiled against; imports no torch."""

from __future__ import annotations

__all__ = ["TORCH_VERSION", "VERSION"]

try:
    from ptsave._torch_build import TORCH_VERSION, VERSION
except ModuleNotFoundError as error:
    raise ImportError(
        "ptsave is not built here: run `make build`, or `pip install --no-build-isolation .`"
    ) from error
