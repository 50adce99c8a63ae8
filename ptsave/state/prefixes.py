"""Adds and strips the prefixes of wrappers in a state dict's keys: ``module.``, ``_orig_mod.``."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ptsave.support.torch_modules import METADATA
from ptsave.tree.containers import items_of


def strip_prefix(
    state_dict: Mapping[str, Any], prefix: str, *, anywhere: bool = False
) -> OrderedDict[str, Any]:
    """Return a state dict without the prefix that a wrapper has put before its keys.

    :class:`torch.nn.DataParallel` and ``DistributedDataParallel`` add ``module.``, and
    :func:`torch.compile` adds ``_orig_mod.``.  Keys without the prefix stay as they are.

    Parameters
    ----------
    state_dict : Mapping of str to object
        It is not changed, and its tensors are not copied.
    prefix : str
        The prefix, with the dot at its end, as in ``"module."``.
    anywhere : bool, default False
        Whether to remove it after every dot, too, for submodules that were wrapped one by one.

    Returns
    -------
    collections.OrderedDict
        In the same order.  ``_metadata``, if there is any, is adapted as
        :func:`torch.nn.modules.utils.consume_prefix_in_state_dict_if_present` does it: the
        metadata of a wrapped module replaces its wrapper's.

    Raises
    ------
    ValueError
        If two keys would become one, or `prefix` does not end in a dot.

    Examples
    --------
    >>> import torch, ptsave
    >>> wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 2)).state_dict()
    >>> list(wrapped), list(ptsave.strip_prefix(wrapped, "module."))
    (['module.weight', 'module.bias'], ['weight', 'bias'])
    """
    _check(prefix)
    if anywhere:
        pattern = re.compile(rf"(?:^|(?<=\.))(?:{re.escape(prefix)})+")

        def strip(key: str) -> str:
            return pattern.sub("", key)
    else:

        def strip(key: str) -> str:
            return key.removeprefix(prefix)

    return renamed(state_dict, strip, _renamed_metadata)


def add_prefix(state_dict: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """Return a state dict with a prefix before every key, as a wrapper's own state dict has it.

    Parameters
    ----------
    state_dict : Mapping of str to object
        It is not changed, and its tensors are not copied.
    prefix : str
        The prefix, with the dot at its end, as in ``"module."``.

    Returns
    -------
    collections.OrderedDict
        In the same order, with ``_metadata`` if there is any.

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
    _check(prefix)
    return renamed(state_dict, lambda key: prefix + key, _renamed_metadata)


def _check(prefix: str) -> None:
    if not prefix.endswith("."):
        raise ValueError(f"the prefix {prefix!r} does not end in a dot: use {prefix + '.'!r}")


def renamed(
    state_dict: Mapping[str, Any],
    rename: Callable[[str], str | None],
    renamed_metadata: Callable[[Mapping[str, Any], Any], OrderedDict[str, Any]],
) -> OrderedDict[str, Any]:
    """Return a state dict with other keys, in the same order, and its metadata.

    `rename` returns None to leave an entry out; keys that are no text stay. `renamed_metadata` gets
    the metadata and `rename`. Two keys that would become one raise ValueError.
    """
    result: OrderedDict[str, Any] = OrderedDict()
    origins: dict[str, str] = {}
    for key, entry in items_of(state_dict):
        new_key = rename(key) if isinstance(key, str) else key
        if new_key is None:
            continue
        if new_key in origins:
            raise ValueError(
                f"the keys {origins[new_key]!r} and {key!r} would both become {new_key!r}: "
                "remove one of them from the state dict"
            )
        origins[new_key] = key
        result[new_key] = entry
    metadata = getattr(state_dict, METADATA, None)
    if metadata is not None:
        setattr(result, METADATA, renamed_metadata(metadata, rename))
    return result


def _renamed_metadata(
    metadata: Mapping[str, Any], rename: Callable[[str], str]
) -> OrderedDict[str, Any]:
    """Rename the keys, which are prefixes of the state dict's without the last dot.

    The entries are copied, because loading with ``assign=True`` writes to them.
    """
    result: OrderedDict[str, Any] = OrderedDict()
    renamed: set[str] = set()
    for key, entry in items_of(metadata):
        old_prefix = key + "." if key else ""
        new_prefix = rename(old_prefix)
        new_key = new_prefix[:-1]
        if new_prefix != old_prefix or new_key not in renamed:
            result[new_key] = copy.copy(entry)
        if new_prefix != old_prefix:
            renamed.add(new_key)
    return result
