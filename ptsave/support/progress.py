"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

__all__ = ["ProgressCallback", "progress_bar", "progress_from"]

ProgressCallback: TypeAlias = Callable[[int], None]


def progress_bar(
    show: bool, description: str, nbytes: int, *, delay: float = 0
) -> AbstractContextManager[ProgressCallback | None]:
    """Return a context with a bar that its function moves to an absolute number of bytes.

    Parameters
    ----------
    show : bool
        If false, nothing is shown and there is no function.
    description : str
        Text in front of the bar.
    nbytes : int
        The total.
    delay : float, default 0
        Seconds before the bar appears; an operation that is over by then shows nothing.
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
    """Return a callback for a part that `begin` bytes precede: it reports their sum."""
    return None if progress is None else lambda done: progress(begin + done)
