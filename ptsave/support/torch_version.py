"""Fails under a torch for which there is no engine, and gets private names of torch."""

from __future__ import annotations

from typing import Any

import torch

from ptsave._built import VERSION
from ptsave.engines import choice

__all__ = ["VERSION", "private"]

choice.find(torch.__version__)


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of torch; raise an ImportError that names a missing one."""
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", None) or type(owner).__name__
        raise ImportError(
            f"torch {torch.__version__} has no {where}.{name}, which ptsave {VERSION} uses: "
            "install another release of ptsave, or a torch that its documentation names"
        ) from None
