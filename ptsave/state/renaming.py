"""Maps the names of a checkpoint's tensors to the names in a model; adds and strips prefixes."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from ptsave.support.torch_modules import METADATA
from ptsave.tree.containers import items_of


class Match(NamedTuple):
    """A pattern that was found in a name, between `begin` and `end`."""

    name: str
    begin: int
    end: int
    pattern: str

    def replaced_by(self, other: str) -> str:
        """Return the name with `other` in place of the pattern."""
        return self.name[: self.begin] + other + self.name[self.end :]


class NamePatterns:
    """Patterns to find in dotted names; a pattern has one or more components, as ``"attn.q_proj"``.

    A dot at either end of a pattern belongs to the pattern, so the dot is replaced, too.

    >>> match = next(NamePatterns([".q_proj"]).matches("attn.q_proj.weight"))
    >>> match.replaced_by(".qkv_proj")
    'attn.qkv_proj.weight'
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = list(patterns)
        self._by_parts: dict[tuple[str, ...], list[str]] = {}
        for pattern in self._patterns:
            parts = tuple(pattern.removeprefix(".").removesuffix(".").split("."))
            self._by_parts.setdefault(parts, []).append(pattern)
        self._longest = max(map(len, self._by_parts), default=0)
        self._first_parts = {parts[0] for parts in self._by_parts}

    def matches(self, name: str) -> Iterator[Match]:
        """Yield each match of a pattern with complete components of a name.

        Matches of more components come first; with equally many components, the rightmost match.
        """
        parts = tuple(name.split("."))
        if self._first_parts.isdisjoint(parts):
            return
        firsts = [i for i in range(len(parts) - 1, -1, -1) if parts[i] in self._first_parts]
        for n_parts in range(min(self._longest, len(parts)), 0, -1):
            for first in firsts:
                if first + n_parts > len(parts):
                    continue
                for pattern in self._by_parts.get(parts[first : first + n_parts], ()):
                    begin = sum(map(len, parts[:first])) + first - pattern.startswith(".")
                    end = begin + len(pattern)
                    if begin >= 0 and end <= len(name):
                        yield Match(name, begin, end, pattern)

    def loose_matches(self, name: str) -> Iterator[Match]:
        """Yield each pattern's last match in a name, even inside components; longest first."""
        for pattern in sorted(self._patterns, key=len, reverse=True):
            begin = name.rfind(pattern)
            if begin >= 0:
                yield Match(name, begin, begin + len(pattern), pattern)


# Maps a name in the file to the name in the model, or to None to leave the tensor out.  The keys of
# a mapping may also be components of names.
Rename: TypeAlias = "Callable[[str], str | None] | Mapping[str, str | None]"


class Renaming:
    """Maps a checkpoint's names to a model's names.

    `rename` is a function of a name, or a mapping. The keys of a mapping are full names, or
    components anywhere in a name; the longest keys are replaced first. A tensor whose new name is
    None is left out. Names that do not begin with `prefix` are left out; the prefix is removed
    before renaming. Without `rename` and `prefix`, `changes` is False: all names stay the same.

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
            self._new_names: dict[Any, Any] = dict(rename)  # not checked yet
            for name, new in self._new_names.items():
                if not isinstance(name, str):
                    raise TypeError(f"rename: a name must be a string, not {name!r}")
                if new is not None and not isinstance(new, str):
                    raise TypeError(f"rename[{name!r}] must be a string or None, not {new!r}")
            self._patterns = NamePatterns(rename)
            self._rename = self._by_mapping
        else:
            raise TypeError(
                f"rename must be a function or a mapping of names, not {type(rename).__name__}"
            )

    def __call__(self, name: str) -> str | None:
        """Return the name in the model, or None if the tensor is left out."""
        if not name.startswith(self._prefix):
            return None
        name = name[len(self._prefix) :]
        if self._rename is None:
            return name
        renamed = self._rename(name)
        if renamed is not None and not isinstance(renamed, str):
            raise TypeError(f"rename({name!r}) is {type(renamed).__name__}, not a string or None")
        return renamed

    def _by_mapping(self, name: str) -> str | None:
        if name in self._new_names:
            new_name: str | None = self._new_names[name]
            return new_name
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


def renamed_metadata(
    metadata: Mapping[str, Any], rename: Callable[[str], str | None]
) -> OrderedDict[str, Any]:
    """Return copies of the modules' metadata, keyed by the modules' names in the model.

    The metadata is copied because loading edits it. If two modules get the same name, the metadata
    of the renamed module is returned, because that module was inside a wrapper.
    """
    result: OrderedDict[str, Any] = OrderedDict()
    moved: set[str] = set()
    marker = ".weight"
    for key, versions in items_of(metadata):
        name = rename(f"{key}{marker}" if key else marker[1:])
        if name is None or not f".{name}".endswith(marker):
            continue
        name = f".{name}".removesuffix(marker).removeprefix(".")
        if name != key or name not in moved:
            result[name] = copy.copy(versions)
        if name != key:
            moved.add(name)
    return result


# ---------------------------------------------------------------------------------- prefixes


def strip_prefix(
    state_dict: Mapping[str, Any], prefix: str, *, anywhere: bool = False
) -> OrderedDict[str, Any]:
    """Return a state dict without the prefix that a wrapper has added to its keys.

    :class:`torch.nn.DataParallel` and ``DistributedDataParallel`` add ``module.``, and
    :func:`torch.compile` adds ``_orig_mod.``.  Keys without the prefix stay as they are.

    Parameters
    ----------
    state_dict : Mapping of str to object
        The state dict.  It is not changed, and its tensors are not copied.
    prefix : str
        The prefix, with the dot at its end, as in ``"module."``.
    anywhere : bool, default False
        Whether to remove the prefix after every dot, too, for submodules that were wrapped one by
        one.

    Returns
    -------
    collections.OrderedDict
        The entries in the same order.  ``_metadata`` is adapted as in
        :func:`torch.nn.modules.utils.consume_prefix_in_state_dict_if_present`: the metadata of a
        wrapped module replaces the metadata of its wrapper.

    Raises
    ------
    ValueError
        If two keys would become equal, or `prefix` does not end in a dot.

    Examples
    --------
    >>> import torch, ptsave
    >>> wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 2)).state_dict()
    >>> list(wrapped), list(ptsave.strip_prefix(wrapped, "module."))
    (['module.weight', 'module.bias'], ['weight', 'bias'])
    """
    _check_prefix(prefix)
    if anywhere:
        pattern = re.compile(rf"(?:^|(?<=\.))(?:{re.escape(prefix)})+")

        def strip(key: str) -> str:
            return pattern.sub("", key)
    else:

        def strip(key: str) -> str:
            return key.removeprefix(prefix)

    return renamed(state_dict, strip)


def add_prefix(state_dict: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """Return a state dict with a prefix before every key, like the state dict of a wrapper.

    Parameters
    ----------
    state_dict : Mapping of str to object
        The state dict.  It is not changed, and its tensors are not copied.
    prefix : str
        The prefix, with the dot at its end, as in ``"module."``.

    Returns
    -------
    collections.OrderedDict
        The entries in the same order, and ``_metadata`` if `state_dict` has it.

    Raises
    ------
    ValueError
        If `prefix` does not end in a dot.

    Examples
    --------
    >>> import torch, ptsave
    >>> list(ptsave.add_prefix(torch.nn.Linear(2, 2).state_dict(), "module."))
    ['module.weight', 'module.bias']
    """
    _check_prefix(prefix)
    return renamed(state_dict, lambda key: prefix + key)


def _check_prefix(prefix: str) -> None:
    if not prefix.endswith("."):
        raise ValueError(f"the prefix {prefix!r} does not end in a dot: use {prefix + '.'!r}")


def renamed(
    state_dict: Mapping[str, Any], rename: Callable[[str], str | None]
) -> OrderedDict[str, Any]:
    """Return a copy of a dict with renamed string keys and renamed metadata, in the same order.

    If `rename` returns None, the entry is left out. Raises a ValueError if two keys would become
    equal.
    """
    result: OrderedDict[str, Any] = OrderedDict()
    origins: dict[str, str] = {}
    for key, entry in items_of(state_dict):
        new_key = rename(key) if isinstance(key, str) else key
        if new_key is None:
            continue
        if new_key in origins:
            raise ValueError(
                f"{origins[new_key]!r} and {key!r} would both become {new_key!r}: remove one of "
                "them from the state dict, or give them different names"
            )
        origins[new_key] = key
        result[new_key] = entry
    metadata = getattr(state_dict, METADATA, None)
    if metadata is not None:
        setattr(result, METADATA, renamed_metadata(metadata, rename))
    return result
