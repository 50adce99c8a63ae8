"""Checks objects that are given by name beside options: ``save_checkpoint(f, model=model)``.

An option's name always means the option, so an object with that name is refused.  An option of
another function is refused, too, because it would become an entry of the file, or a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

import torch


class _Option(NamedTuple):
    """An option of the function `owner`, and the types of its values.

    A value of another type under the option's name is an object.
    """

    owner: str
    kinds: tuple[type, ...]


_NONE = type(None)
_GROUPS = (torch.distributed.ProcessGroup,) if torch.distributed.is_available() else ()
_OPTIONS = {
    "pickle_module": _Option("ptsave.save", (ModuleType,)),
    "pickle_protocol": _Option("ptsave.save", (int,)),
    "_use_new_zipfile_serialization": _Option("ptsave.save", (bool,)),
    "_disable_byteorder_record": _Option("ptsave.save", (bool,)),
    "fsync": _Option("ptsave.save_checkpoint", (bool,)),
    "atomic": _Option("ptsave.save_checkpoint", (bool,)),
    "progress": _Option("ptsave.load_checkpoint", (bool,)),
    "storage_options": _Option("ptsave.save_checkpoint", (Mapping, _NONE)),
    "process_group": _Option("ptsave.load_checkpoint", (*_GROUPS, _NONE)),
    "weights_only_check": _Option("ptsave.save_checkpoint", (bool,)),
    "staging": _Option("ptsave.AsyncCheckpointer", (str,)),
    "max_staged_bytes": _Option("ptsave.AsyncCheckpointer", (int, _NONE)),
    "when_full": _Option("ptsave.AsyncCheckpointer", (str,)),
    "mmap": _Option("ptsave.load", (bool, _NONE)),
    "strict": _Option("ptsave.load_checkpoint", (bool,)),
    "map_location": _Option("ptsave.load_checkpoint", (str, torch.device)),
    "weights_only": _Option("ptsave.load_checkpoint", (bool, _NONE)),
    "verify": _Option("ptsave.load_checkpoint", (bool,)),
    "assign": _Option("ptsave.load_checkpoint", (bool,)),
    "ignore_mismatched_sizes": _Option("ptsave.load_checkpoint", (bool,)),
    "match": _Option("ptsave.load_checkpoint", (str, _NONE)),
    "key_mapping": _Option("ptsave.load_checkpoint", (FunctionType,)),
    "named_parameters": _Option("ptsave.load_into", (GeneratorType,)),
}


_SAVING_ADVICE = "save that under another name, or in a dict under another name"
_RESTORING_ADVICE = "the call returns the entry of that name, for you to load_state_dict() it"


def check_saving(function: str, objects: Mapping[str, Any], **options: Any) -> None:
    """Refuse objects named like an option, and options of other functions.

    >>> check_saving("ptsave.save_checkpoint", {"strict": False}, fsync=True)
    Traceback (most recent call last):
    ...
    TypeError: strict=False is an option of ptsave.load_checkpoint, which ptsave.save_checkpoint \
does not have: leave it out, or give what it stands for another name
    """
    _check_own(function, _SAVING_ADVICE, options)
    _refuse_others(function, objects)


def check_restoring(function: str, targets: Mapping[str, Any], **options: Any) -> None:
    """Refuse targets named like an option, and options of other functions."""
    _check_own(function, _RESTORING_ADVICE, options)
    _refuse_others(function, targets)


def _check_own(function: str, advice: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        is_location = name == "map_location" and _is_location(value)
        is_mapping = name == "key_mapping" and _is_key_mapping(value)
        if not (is_location or is_mapping) and not isinstance(value, _OPTIONS[name].kinds):
            raise TypeError(
                f"{name!r} is an option of {function}, which cannot be of type "
                f"{type(value).__name__}: if it is an object of yours, {advice}"
            )


def _is_location(value: Any) -> bool:
    """Return whether a value is a map_location for torch.load, not a target."""
    if hasattr(value, "load_state_dict"):
        return False
    return value is None or isinstance(value, (str, torch.device, dict)) or callable(value)


def _is_key_mapping(value: Any) -> bool:
    """Return whether a value is a function or a mapping of names, not a target."""
    if hasattr(value, "load_state_dict"):
        return False
    return value is None or isinstance(value, Mapping) or callable(value)


def _refuse_others(function: str, objects: Mapping[str, Any]) -> None:
    for name, option in _OPTIONS.items():
        if name in objects and isinstance(objects[name], option.kinds):
            raise TypeError(
                f"{name}={objects[name]!r} is an option of {option.owner}, which {function} does "
                "not have: leave it out, or give what it stands for another name"
            )


def entries_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint: each object's state dict, or the object itself."""
    return {name: _state_of(obj) for name, obj in objects.items()}


def _state_of(obj: Any) -> Any:
    state_dict = getattr(obj, "state_dict", None)
    return state_dict() if callable(state_dict) and not isinstance(obj, type) else obj
