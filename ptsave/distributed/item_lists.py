"""Lists of plans' items and of results that ranks exchange quickly.

DCP pickles all items for every exchange.  Unpickling makes thousands of objects, which start
Python's garbage collector again and again.  Its runs take eight times as long as the rest.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any, TypeVar

from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from ptsave.support.calls import pausing_garbage_collection

_Item = TypeVar("_Item")
_Plan = TypeVar("_Plan", SavePlan, LoadPlan)


class ItemList(list[_Item]):
    """A list that is pickled, and unpickled, while the garbage collector pauses.

    >>> items = pickle.loads(pickle.dumps(ItemList([1, "two"])))
    >>> items, type(items) is ItemList
    ([1, 'two'], True)
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the function and the bytes that make the list again."""
        with pausing_garbage_collection():
            return _unpickled, (pickle.dumps([*self]),)


def _unpickled(data: bytes) -> ItemList[Any]:
    with pausing_garbage_collection():
        return ItemList(pickle.loads(data))


def with_item_list(plan: _Plan) -> _Plan:
    """Return a plan whose items are in an `ItemList`."""
    if isinstance(plan.items, ItemList):
        return plan
    return dataclasses.replace(plan, items=ItemList(plan.items))
