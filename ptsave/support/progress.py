"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

__all__ = ["ProgressCallback", "progress_bar", "progress_from"]

ProgressCallback: TypeAlias = Callable[[int], None]


@contextmanager
def progress_bar(
    show: bool, description: str, nbytes: int, *, delay: float = 0
) -> Iterator[ProgressCallback | None]:
    """Show a bar that the yielded function moves to an absolute number of bytes.

    Parameters
    ----------
    show : bool
        If false, nothing is shown and None is yielded.
    description : str
        Text in front of the bar.
    nbytes : int
        The total.
    delay : float, default 0
        Seconds before the bar appears; an operation that is over by then shows nothing.
    """
    if not show:
        yield None
        return
    from tqdm import tqdm

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
