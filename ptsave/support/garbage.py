"""Pauses Python's garbage collector."""

from __future__ import annotations

import gc

__all__ = ["GarbageCollectionPause", "pausing_garbage_collection"]


class GarbageCollectionPause:
    """A block in which many objects are made without the collector's looking for garbage in them.

    No generator: ending one makes objects, so that the collector would look at all that the block
    has made, which is often about to go.
    """

    def __init__(self) -> None:
        self._was_enabled = False

    def __enter__(self) -> GarbageCollectionPause:
        self._was_enabled = gc.isenabled()
        if self._was_enabled:  # or the pause of another thread may end before this line, for good
            gc.disable()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """End the pause before its block does, because code that is not ours runs now."""
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()


def pausing_garbage_collection() -> GarbageCollectionPause:
    """Make many objects without the collector's looking for garbage among them."""
    return GarbageCollectionPause()
