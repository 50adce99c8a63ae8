"""Refuses to go on under a torch of another minor series than ptsave was compiled against."""

from typing import Any

import torch

from ptsave.support.version import TORCH_VERSION, VERSION

__all__ = ["TORCH_VERSION", "VERSION", "private"]


def _minor_series(version: str) -> str:
    return ".".join(version.split(".")[:2])


_BUILT_FOR = _minor_series(TORCH_VERSION)

if _minor_series(torch.__version__) != _BUILT_FOR:
    raise ImportError(
        f"this ptsave was built for torch {_BUILT_FOR} and torch {torch.__version__} is installed: "
        "reinstall ptsave with `pip install --no-build-isolation --force-reinstall --no-deps`, "
        f"or install torch=={_BUILT_FOR}.*"
    )


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of torch's.

    Raises
    ------
    ImportError
        This torch has none of that name: ptsave does not know this release.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", None) or type(owner).__name__
        raise ImportError(
            f"torch {torch.__version__} has no {where}.{name}, which ptsave {VERSION} uses: "
            "install another release of ptsave, or a torch that its README names"
        ) from None
