"""The options of the functions that save objects, made once from a call's arguments."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from torch.serialization import DEFAULT_PROTOCOL

from ptsave.support.calls import check_flags


@dataclass(frozen=True, eq=False, repr=False)
class SaveOptions:
    """The arguments of :func:`ptsave.async_save` beside object and file; some are `save`'s, too."""

    pickle_module: ModuleType = pickle
    pickle_protocol: int = DEFAULT_PROTOCOL
    _use_new_zipfile_serialization: bool = True
    _disable_byteorder_record: bool = False
    fsync: bool = False
    atomic: bool = True
    progress: bool = False
    storage_options: Mapping[str, Any] | None = None
    weights_only_check: bool = False
    staging: str = "blocking"
    max_staged_bytes: int | None = None
    when_full: str = "wait"

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> SaveOptions:
        """Return the options among a call's arguments, given as ``locals()``."""
        return cls(
            **{each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        )

    def check(self) -> None:
        """Raise for a value that an option cannot have."""
        if self.staging not in ("blocking", "background"):
            raise ValueError(f"staging must be 'blocking' or 'background', not {self.staging!r}")
        if self.when_full not in ("wait", "raise"):
            raise ValueError(f"when_full must be 'wait' or 'raise', not {self.when_full!r}")
        check_flags(
            fsync=self.fsync, atomic=self.atomic, weights_only_check=self.weights_only_check
        )
