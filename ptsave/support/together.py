"""Calls that all ranks of a job make: if one rank fails, all raise.

The code for process groups is imported only if there are other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def has_others(group: Any) -> bool:
    """Return whether a process group, or None, has other ranks; raises as `GroupCall` does."""
    if group is None:
        return False
    from ptsave.support.group_call import GroupCall

    return GroupCall(group).size > 1


@contextmanager
def failing_together(group: Any, name: str) -> Iterator[None]:
    """Tell the other ranks of an error in the block, in place of their first exchange."""
    try:
        yield
    except Exception as error:
        if has_others(group):
            from ptsave.support.group_call import GroupCall

            call = GroupCall(group)
            call.name = name
            call.agree(None, error)
        raise
