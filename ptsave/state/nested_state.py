"""Finds the state dict that was probably meant in a checkpoint that has more in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from ptsave.tree.containers import items_of

__all__ = ["advice", "parts_with_tensors"]

_MAX_DEPTH = 3
_MAX_ENTRIES = 200  # of one container: a state dict has its parts among the first
_PREFIXES = ("", "module.", "_orig_mod.", "model.")


def parts_with_tensors(obj: Mapping[Any, Any]) -> list[str]:
    """Return the names of the entries that are dicts of nothing but tensors, as ``"model"``."""
    return [".".join(path) for path, part in _parts(obj) if path and _is_state_dict(part)]


def advice(obj: Any, wanted: Iterable[str]) -> str:
    """Return a sentence that names the part of a checkpoint that fits a module, and its loader.

    Parameters
    ----------
    obj : object
        The object in the file.
    wanted : iterable of str
        The keys of the module's state dict.

    Returns
    -------
    str
        Empty if no part fits better than the whole.

    Examples
    --------
    >>> import torch
    >>> advice({"net": {"w": torch.ones(1)}, "epoch": 3}, ["w"])
    "The file's entry 'net' fits: ptsave.load_checkpoint(path, net=model)"
    """
    keys = set(wanted)
    if not isinstance(obj, Mapping) or not keys:
        return ""
    best: tuple[tuple[str, ...], str] = ((), "")
    n_best = len(keys.intersection(obj))
    for path, part in _parts(obj):
        names = [key for key in part if isinstance(key, str)]
        for prefix in _PREFIXES:
            found = {name[len(prefix) :] for name in names if name.startswith(prefix)}
            if len(keys & found) > n_best:
                best, n_best = (path, prefix), len(keys & found)
    return _sentence(*best) if best != ((), "") and 2 * n_best > len(keys) else ""


def _parts(obj: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """Yield the dicts in a checkpoint with their paths, the whole first."""
    pending: list[tuple[tuple[str, ...], Mapping[Any, Any]]] = [((), obj)]
    for path, part in pending:
        yield path, part
        if len(path) < _MAX_DEPTH:
            children = islice(items_of(part), _MAX_ENTRIES)
            pending += [
                ((*path, key), child)
                for key, child in children
                if isinstance(key, str) and isinstance(child, Mapping)
            ]


def _is_state_dict(part: Mapping[Any, Any]) -> bool:
    return bool(part) and all(isinstance(value, Tensor) for value in part.values())


def _sentence(path: tuple[str, ...], prefix: str) -> str:
    keys = "".join(f"[{key!r}]" for key in path)
    entry = ".".join(path)
    if prefix:
        where = f"the keys of its entry {entry!r}" if path else "the keys in the file"
        return (
            f"All would fit better if {where} did not begin with {prefix!r}: "
            f"ptsave.load_state_dict(model, ptsave.strip_prefix(ptsave.load(path){keys}, "
            f"{prefix!r}))"
        )
    if len(path) > 1:
        call = f"ptsave.load_state_dict(model, ptsave.load(path){keys})"
    elif path[0].isidentifier():
        call = f"ptsave.load_checkpoint(path, {path[0]}=model)"
    else:
        call = f"ptsave.load_checkpoint(path, **{{{path[0]!r}: model}})"
    return f"The file's entry {entry!r} fits: {call}"
