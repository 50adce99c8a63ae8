"""The options of restores, and a check for calls that take both options and named objects.

The name of an option always means the option, so an object with this name is refused.  An option
of another function is refused, too: otherwise it would become an entry of the file, or a target.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import FunctionType, GeneratorType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from ptsave.support.calls import location_of, one_of

if TYPE_CHECKING:
    from ptsave.state.renaming import Rename
    from ptsave.writing.planning import SaveOptions

Match: TypeAlias = 'Literal["order", "name"] | None'
# A function or mapping for all modules and optimizers, or one for each name of a target.
KeyMapping: TypeAlias = "Rename | Mapping[str, Rename]"
Location: TypeAlias = Any
ProcessGroup: TypeAlias = Any


@dataclass(frozen=True, eq=False, repr=False)
class RestoreOptions:
    """The options of :func:`ptsave.load_checkpoint`: all arguments except file and targets."""

    strict: bool = True
    assign: bool = False
    map_location: Location = None
    weights_only: bool | None = None
    verify: bool = True
    progress: bool = False
    ignore_mismatched_sizes: bool = False
    match: Match = None
    key_mapping: KeyMapping | None = None
    storage_options: Mapping[str, Any] | None = None
    process_group: ProcessGroup = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> RestoreOptions:
        """Return the options among `arguments`, which are the ``locals()`` of a public call."""
        found = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        key_mapping, rename = arguments["key_mapping"], arguments["rename"]
        found["map_location"] = location_of(arguments["map_location"], arguments["device"])
        found["key_mapping"] = one_of(key_mapping=key_mapping, rename=rename)
        return cls(**found)


_NONE = type(None)
_GROUPS = (torch.distributed.ProcessGroup,) if torch.distributed.is_available() else ()
# Annotation -> types of an option's values.  A value of another type is an object to save.
_KINDS: dict[Any, tuple[type, ...]] = {
    "bool": (bool,),
    "bool | None": (bool, _NONE),
    "int": (int,),
    "int | None": (int, _NONE),
    "ModuleType": (ModuleType,),
    "str": (str,),
    "Base | str | os.PathLike[str] | None": (str, os.PathLike, _NONE),
    "Mapping[str, Any] | None": (Mapping, _NONE),
    "ProcessGroup": (*_GROUPS, _NONE),
    "Match": (str, _NONE),
    "Location": (str, torch.device),
    "KeyMapping | None": (FunctionType,),
}
# Options that neither `save_checkpoint` nor `load_checkpoint` has, and their functions.
_OWNERS = {
    "pickle_module": "ptsave.save",
    "pickle_protocol": "ptsave.save",
    "_use_new_zipfile_serialization": "ptsave.save",
    "_disable_byteorder_record": "ptsave.save",
    "staging": "ptsave.AsyncCheckpointer",
    "max_staged_bytes": "ptsave.AsyncCheckpointer",
    "when_full": "ptsave.AsyncCheckpointer",
}
_SAVING_ADVICE = "save the object under another name, or in a dict under another name"
_RESTORING_ADVICE = "leave it out and load it yourself, because the call returns the entry"


def check_named(
    function: str, options: SaveOptions | RestoreOptions, objects: Mapping[str, Any]
) -> None:
    """Raise TypeError for objects with an option's name, and for options of other functions."""
    for option in fields(options):
        value = getattr(options, option.name)
        is_own = option.name not in _OWNERS
        if is_own and not _is_value(option.name, value, _KINDS[option.type]):
            restores = isinstance(options, RestoreOptions)
            raise TypeError(
                f"{option.name!r} is an option of {function}, which cannot be of type "
                f"{type(value).__name__}: if you mean an object of your own, "
                f"{_RESTORING_ADVICE if restores else _SAVING_ADVICE}"
            )
    for owner, name, kinds in _all_options():
        if name in objects and isinstance(objects[name], kinds):
            raise TypeError(
                f"{name}={objects[name]!r} is an option of {owner}, which {function} does "
                "not have: leave it out, or give your object another name if you mean an object"
            )


def _is_value(name: str, value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value is probably meant as the option `name`, not as an object."""
    if name not in ("map_location", "key_mapping"):
        return isinstance(value, kinds)
    if hasattr(value, "load_state_dict"):
        return False
    mappings = (str, torch.device, dict) if name == "map_location" else (Mapping,)
    return value is None or callable(value) or isinstance(value, mappings)


def _all_options() -> Iterator[tuple[str, str, tuple[type, ...]]]:
    """Yield each option whose name no object may have: its function, its name and its types."""
    from ptsave.writing.planning import SaveOptions

    for owner, options in (
        ("ptsave.save_checkpoint", SaveOptions),
        ("ptsave.load_checkpoint", RestoreOptions),
    ):
        for each in fields(options):
            yield _OWNERS.get(each.name, owner), each.name, _KINDS[each.type]
    yield "ptsave.AsyncCheckpointer.restore", "fallback", (bool,)
    yield "ptsave.AsyncCheckpointer", "on_error", (str,)
    yield "ptsave.load", "mmap", (bool, _NONE)
    yield "ptsave.load_into", "named_parameters", (GeneratorType,)


def entries_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint: each object's state dict, or the object itself."""
    return {name: _state_of(obj) for name, obj in objects.items()}


def _state_of(obj: Any) -> Any:
    state_dict = getattr(obj, "state_dict", None)
    return state_dict() if callable(state_dict) and not isinstance(obj, type) else obj
