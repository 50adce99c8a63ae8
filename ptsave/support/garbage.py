"""Pauses Python's garbage collector."""

from __future__ import annotations

import gc


class GarbageCollectionPause:
    """A block that makes many objects while the garbage collector is off.

    It is not a generator: ending a generator makes objects, which would start the collector.  It
    would then look at all objects of the block, which are often about to go.
    """

    def __init__(self) -> None:
        self._was_enabled = False

    def __enter__(self) -> GarbageCollectionPause:
        self._was_enabled = gc.isenabled()
        # Not otherwise: another thread may end its pause here, and the collector would stay off.
        if self._was_enabled:
            gc.disable()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """End the pause before the block ends, because other code runs now."""
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()


def pausing_garbage_collection() -> GarbageCollectionPause:
    """Return a block that makes many objects while the garbage collector is off."""
    return GarbageCollectionPause()
