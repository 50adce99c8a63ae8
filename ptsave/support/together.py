"""Calls that a process makes alone or as a rank: imports what ranks need only for those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["failing_together", "has_others"]


def has_others(group: Any) -> bool:
    """Whether a process group, or None, has other ranks than this; errors as of `GroupCall`."""
    if group is None:
        return False
    from ptsave.support.group_call import GroupCall

    return GroupCall(group).size > 1


@contextmanager
def failing_together(group: Any, name: str) -> Iterator[None]:
    """Tell the other ranks of an error in the block, in the place of their first exchange.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        The ranks.
    name : str
        The file that the call is about.
    """
    try:
        yield
    except Exception as error:
        if has_others(group):
            from ptsave.support.group_call import GroupCall

            call = GroupCall(group)
            call.name = name
            call.agree(None, error)
        raise
