"""Maps the names of a checkpoint's tensors to the names in a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ptsave.state.name_patterns import Match, NamePatterns
from ptsave.state.prefixes import renamed
from ptsave.tree.containers import items_of

# A name in the file -> the model's, or None to leave the tensor out; or parts of names.
Rename: TypeAlias = "Callable[[str], str | None] | Mapping[str, str | None]"


class Renaming:
    """The names that a model has for a checkpoint's.

    `rename` is a function of a name, or a mapping. A mapping replaces whole names, or one or more
    components of a name wherever they are, the longest first. The new name None leaves a tensor
    out. Only names that begin with `prefix` count; it is removed before they are renamed. `changes`
    tells whether there is anything to do.

    >>> Renaming({"encoder.h": "layers", "gamma": "weight"}, "model.")("model.encoder.h.gamma")
    'layers.weight'
    >>> Renaming(None, "model.")("vision.ln.gamma") is None
    True
    """

    def __init__(self, rename: Rename | None = None, prefix: str = "") -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, not {type(prefix).__name__}")
        self._prefix = prefix
        self.changes = bool(prefix) or rename is not None
        self._rename: Callable[[str], str | None] | None
        if rename is None or callable(rename):
            self._rename = rename
        elif isinstance(rename, Mapping):
            self._new_names = dict(rename)
            for name, new in self._new_names.items():
                _check_names(name, new)
            self._patterns = NamePatterns(rename)
            self._rename = self._by_mapping
        else:
            raise TypeError(
                f"rename must be a function or a mapping of names, not {type(rename).__name__}"
            )

    def __call__(self, name: str) -> str | None:
        """Return the model's name; None for a tensor that is left out."""
        if not name.startswith(self._prefix):
            return None
        name = name[len(self._prefix) :]
        if self._rename is None:
            return name
        renamed = self._rename(name)
        if renamed is not None and not isinstance(renamed, str):
            raise TypeError(f"rename({name!r}) is {type(renamed).__name__}, not a string or None")
        return renamed

    def of_state_dict(self, state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return a state dict, with its metadata, under the model's names."""
        return renamed(
            state_dict, self, lambda metadata, _: OrderedDict(renamed_metadata(metadata, self))
        )

    def _by_mapping(self, name: str) -> str | None:
        if name in self._new_names:
            return self._new_names[name]
        found: list[Match] = []
        for match in self._patterns.matches(name):  # the longest first
            if all(match.end <= other.begin or other.end <= match.begin for other in found):
                found.append(match)
        for match in sorted(found, key=lambda each: each.begin, reverse=True):
            new = self._new_names[match.pattern]
            if new is None:
                return None
            name = name[: match.begin] + new + name[match.end :]
        return name


def _check_names(name: object, new: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"rename: a name must be a string, not {name!r}")
    if new is not None and not isinstance(new, str):
        raise TypeError(f"rename[{name!r}] must be a string or None, not {new!r}")


def renamed_metadata(
    metadata: Mapping[str, Any], renaming: Callable[[str], str | None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the versions of modules by their names in the model: copies, as loads edit them."""
    marker = ".weight"
    for key, versions in items_of(metadata):
        name = renaming(f"{key}{marker}" if key else marker[1:])
        if name is not None and f".{name}".endswith(marker):
            yield f".{name}".removesuffix(marker).removeprefix("."), dict(versions)
