"""The version of ptsave; imports no torch."""

from __future__ import annotations

__all__ = ["VERSION"]

try:
    from ptsave._built import VERSION
except ModuleNotFoundError as error:
    raise ImportError(
        "ptsave is not built here: run `make build`, or `pip install --no-build-isolation .`"
    ) from error
