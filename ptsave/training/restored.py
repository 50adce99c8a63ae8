"""The result of `load_checkpoint`: the entries without a target, and a report of the targets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ptsave.state.modules import IncompatibleKeys


class RestoredEntries(dict[str, Any]):
    """The entries of a checkpoint that have no target: a dict, with a report of the targets.

    Attributes
    ----------
    report : dict of str to IncompatibleKeys
        The keys that did not match, by the name of each restored module, optimizer and dict.
        ``missing_keys`` are not in the checkpoint, ``unexpected_keys`` are not in the target.
        ``mismatched_keys`` were left out because their shapes differ; they come with the
        checkpoint's shape and the target's.  The keys of an optimizer are names of parameters, or
        their saved numbers if it was matched by order.  A module is left out if it has a
        ``load_state_dict`` of its own that returns no keys.

    Notes
    -----
    Equal to a plain dict of these entries.  Pickled, and so in a checkpoint, it is an
    `OrderedDict` without the report, which ``weights_only=True`` loads.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> stream = io.BytesIO()
    >>> ptsave.save_checkpoint(stream, model=torch.nn.Linear(1, 1, bias=False), epoch=3)
    >>> _ = stream.seek(0)
    >>> rest = ptsave.load_checkpoint(stream, model=torch.nn.Linear(1, 1), strict=False)
    >>> rest, rest.report["model"].missing_keys
    ({'epoch': 3}, ['bias'])
    """

    report: dict[str, IncompatibleKeys]

    def __init__(
        self, entries: Mapping[str, Any], report: Mapping[str, IncompatibleKeys] | None = None
    ) -> None:
        super().__init__(entries)
        self.report = dict(report or {})

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


def keys_of(result: Any) -> IncompatibleKeys | None:
    """Return the keys that a load has reported, or None if it reported none."""
    if isinstance(result, IncompatibleKeys):
        return result
    missing = getattr(result, "missing_keys", None)
    unexpected = getattr(result, "unexpected_keys", None)
    if not isinstance(missing, list) or not isinstance(unexpected, list):
        return None
    return IncompatibleKeys(missing, unexpected, getattr(result, "mismatched_keys", None))
