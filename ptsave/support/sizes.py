"""Parses sizes as people write them: ``"500MB"``, ``"2GiB"``."""

from __future__ import annotations

import operator
import re
from contextlib import suppress

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def parse_size(size: int | str, name: str) -> int:
    """Return a number of bytes; `name` is the argument's name, for messages.

    >>> parse_size("1.5 KiB", "max_size"), parse_size("500MB", "max_size")
    (1536, 500000000)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", size)
        if match is not None and match[2].upper() in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2].upper()])
    elif not isinstance(size, bool):
        with suppress(TypeError):
            size = operator.index(size)  # NumPy's integers, too
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"{name} must be a number of bytes, such as 5_000_000_000, '5GB' or '500MiB', "
            f"not {size!r}"
        )
    return size
