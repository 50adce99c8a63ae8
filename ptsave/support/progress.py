"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

ProgressCallback: TypeAlias = Callable[[int], None]


def progress_bar(
    show: bool, description: str, nbytes: int, *, delay: float = 0
) -> AbstractContextManager[ProgressCallback | None]:
    """Return a context with a bar, and with a function that moves it to a number of bytes.

    Without `show` there is no bar and no function.  The bar appears after `delay` seconds, so a
    shorter operation shows nothing.
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
    """Return a callback for a part of a file, which adds the `begin` bytes before the part."""
    return None if progress is None else lambda done: progress(begin + done)
