"""Warnings that point at the caller's code, however many frames of ptsave are in between."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost frame outside of ptsave."""
    level = 1
    while _is_internal(sys._getframe(level).f_code.co_filename):
        level += 1
    warnings.warn(message, category, stacklevel=level + 1)


def _is_internal(filename: str) -> bool:
    return filename.startswith(_PACKAGE) or filename == contextlib.__file__
