"""Results of `load_checkpoint`: the entries that are no target's, and a report of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ptsave.state.modules import IncompatibleKeys

__all__ = ["RestoredEntries", "keys_of"]


class RestoredEntries(dict[str, Any]):
    """The entries of a checkpoint that were no target's: a dict, with a report of the targets.

    Attributes
    ----------
    report : dict of str to IncompatibleKeys
        For each module, optimizer and dict that was restored, by its name: the keys that the
        checkpoint has not got (``missing_keys``), those that the target has no place for
        (``unexpected_keys``), and those that were left out because their shapes differ
        (``mismatched_keys``, with the checkpoint's shape and the target's).  The keys of an
        optimizer are names of parameters, or (saved) numbers where it was matched by order.  A
        module with a ``load_state_dict`` of its own that returns no keys is not in it.

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
    """Return the keys that a load has reported; None if it has reported nothing."""
    if isinstance(result, IncompatibleKeys):
        return result
    missing = getattr(result, "missing_keys", None)
    unexpected = getattr(result, "unexpected_keys", None)
    if not isinstance(missing, list) or not isinstance(unexpected, list):
        return None
    return IncompatibleKeys(missing, unexpected, getattr(result, "mismatched_keys", None))
