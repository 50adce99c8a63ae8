"""Helpers for public functions: options, progress, warnings, garbage collection, rank errors."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

ProgressCallback: TypeAlias = Callable[[int], None]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


# ----------------------------------------------------------------------------------------- options


def check_flags(**flags: object) -> None:
    """Raise a TypeError if an option's value is not a bool, because "no" would count as True."""
    for name, value in flags.items():
        if name == "verify" and value == "background":
            raise ValueError("only ptsave.load with mmap=True takes verify='background'")
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def checked_int(value: Any, name: str, minimum: int) -> int:
    """Return an int, or NumPy's, as an int; raise TypeError or ValueError for any other value."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {number}")
    return number


def optional_int(value: Any, name: str, minimum: int) -> int | None:
    """Return None if the value is None; else, do as `checked_int`."""
    return None if value is None else checked_int(value, name, minimum)


def one_of(**values: Any) -> Any:
    """Return the value that is not None, or None; raise a TypeError if several are not None.

    >>> one_of(map_location=None, device="cpu")
    'cpu'
    >>> one_of(map_location="cpu", device="cpu")
    Traceback (most recent call last):
    ...
    TypeError: map_location and device are two names of one option: give one of them
    """
    given = [value for value in values.values() if value is not None]
    if len(given) > 1:
        raise TypeError(f"{' and '.join(values)} are two names of one option: give one of them")
    return given[0] if given else None


def location_of(map_location: Any, device: Any) -> Any:
    """Return the argument that is not None, as torch's `map_location`; raise if both are given.

    An integer `device` becomes a torch.device, because torch's `map_location` takes no integers.
    """
    import torch  # not at import: commands that need no torch use this module, too

    if not isinstance(device, (torch.device, str, int, type(None))):
        raise TypeError(f"device must be a device or its name, not {type(device).__name__}")
    if isinstance(device, int):
        device = torch.device(device)
    return one_of(map_location=map_location, device=device)


def parse_size(size: int | str, name: str) -> int:
    """Return `size`, such as "2GiB", as a number of bytes; `name` is the option in error messages.

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


# ---------------------------------------------------------------------------------------- progress


def progress_bar(
    show: bool, description: str, nbytes: int, *, delay: float = 0
) -> AbstractContextManager[ProgressCallback | None]:
    """Return a context manager: it shows a bar, and yields a function that sets the bytes done.

    Without `show`, there is no bar, and the manager yields None.  The bar appears after `delay`
    seconds, so a shorter operation shows nothing.
    """
    return _bar(description, nbytes, delay) if show else nullcontext()


@contextmanager
def _bar(description: str, nbytes: int, delay: float) -> Iterator[ProgressCallback]:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm", name="tqdm") from error
    with tqdm(
        total=nbytes, desc=description, unit="B", unit_scale=True, unit_divisor=1024, delay=delay
    ) as bar:

        def move_to(done: int) -> None:
            bar.update(done - bar.n)

        yield move_to
        move_to(nbytes)


def progress_from(progress: ProgressCallback | None, begin: int) -> ProgressCallback | None:
    """Return a callback that adds `begin` to its argument and calls `progress`; None for None."""
    return None if progress is None else lambda done: progress(begin + done)


# ---------------------------------------------------------------------------------------- warnings


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the line outside ptsave that called ptsave."""
    level = 1
    while _is_internal(sys._getframe(level).f_code.co_filename):
        level += 1
    warnings.warn(message, category, stacklevel=level + 1)


def _is_internal(filename: str) -> bool:
    return filename.startswith(_PACKAGE) or filename in (contextlib.__file__, functools.__file__)


# ------------------------------------------------------------------------------- garbage collection


class _Pause:
    """Keeps the garbage collector off during a `with` block.

    This is a class and not a generator, because a generator makes objects when it ends, which may
    start the collector.  The collector would then visit all objects that the block has made,
    although most of them will be freed soon.
    """

    def __init__(self) -> None:
        self._was_enabled = False

    def __enter__(self) -> _Pause:
        self._was_enabled = gc.isenabled()
        # If another thread's pause ends between these lines, the collector must stay on.
        if self._was_enabled:
            gc.disable()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Turn the collector on again before the `with` block ends."""
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()


# For a block that makes many objects.
pausing_garbage_collection = _Pause


# -------------------------------------------------------------------------------------------- ranks


def has_others(group: Any) -> bool:
    """Return whether a process group has more than one rank; return False if `group` is None."""
    if group is None:
        return False
    from ptsave.support.group_call import GroupCall

    return GroupCall(group).size > 1


@contextmanager
def failing_together(group: Any, name: str) -> Iterator[None]:
    """If the `with` block raises, send the error to the other ranks in `group`: they raise, too."""
    try:
        yield
    except Exception as error:
        if has_others(group):
            from ptsave.support.group_call import GroupCall

            call = GroupCall(group)
            call.name = name
            call.agree(None, error)
        raise
