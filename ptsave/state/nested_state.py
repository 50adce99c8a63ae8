"""Finds the state dict that was probably meant in a checkpoint that holds more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ptsave.state.name_keyed import is_name_keyed
from ptsave.tree.containers import items_of

_MAX_DEPTH = 3
_MAX_ENTRIES = 200  # in one container: a checkpoint has its parts among the first
_PREFIXES = ("", "module.", "_orig_mod.", "model.")


def parts_with_tensors(obj: Mapping[Any, Any]) -> list[str]:
    """Return the paths of the dicts of nothing but tensors in a checkpoint, such as ``model``."""
    return [
        ".".join(path)
        for path, part in _parts(obj)
        if path and part and all(isinstance(value, Tensor) for value in part.values())
    ]


def advice(obj: Any, wanted: Iterable[str], target: str = "model") -> str:
    """Return a sentence that names the part of a checkpoint that fits a target, and its loader.

    It is empty if no part fits better than the whole. `wanted` are the keys of the target's state
    dict. `target` is "model" for a module, or "target" for a dict.

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
    return _sentence(*best, target) if best != ((), "") and 2 * n_best > len(keys) else ""


def optimizer_advice(obj: Any, optimizer: Optimizer) -> str:
    """Return a sentence that names the part of a checkpoint that fits an optimizer, or nothing.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1)])
    >>> optimizer_advice({"optim": sgd.state_dict(), "epoch": 3}, sgd)
    "The file's entry 'optim' fits: ptsave.load_checkpoint(path, optim=optimizer)"
    """
    if not isinstance(obj, Mapping):
        return ""
    found = [
        (path, part)
        for path, part in _parts(obj)
        if path and (is_name_keyed(part) or ("param_groups" in part and "state" in part))
    ]
    n_params = sum(len(group["params"]) for group in optimizer.param_groups)
    for path, part in sorted(found, key=lambda each: _n_params(each[1]) != n_params):
        verb = "fits" if _n_params(part) == n_params else "is one of an optimizer"
        keys = "".join(f"[{key!r}]" for key in path)
        call = f"ptsave.load_optimizer_state_dict(optimizer, ptsave.load(path){keys})"
        if len(path) == 1:
            call = _checkpoint_call(path[0], "optimizer")
        return f"The file's entry {'.'.join(path)!r} {verb}: {call}"
    return ""


def _n_params(part: Mapping[Any, Any]) -> int:
    """Return the number of parameters, or -1 for a flat state dict, which has no groups."""
    groups = part.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        return -1
    groups = [group for group in groups if isinstance(group, Mapping)]
    return sum(len(group.get("params", ())) for group in groups)


def _parts(obj: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """Yield a checkpoint and the dicts in it, with their paths."""
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


def _checkpoint_call(name: str, target: str) -> str:
    if name.isidentifier():
        return f"ptsave.load_checkpoint(path, {name}={target})"
    return f"ptsave.load_checkpoint(path, **{{{name!r}: {target}}})"


def _sentence(path: tuple[str, ...], prefix: str, target: str) -> str:
    keys = "".join(f"[{key!r}]" for key in path)
    entry = ".".join(path)
    if prefix:
        where = f"the keys of its entry {entry!r}" if path else "the keys in the file"
        return f"All would fit better if {where} did not begin with {prefix!r}: " + _loading_call(
            f"ptsave.strip_prefix(ptsave.load(path){keys}, {prefix!r})", target
        )
    if len(path) > 1:
        call = _loading_call(f"ptsave.load(path){keys}", target)
    else:
        call = _checkpoint_call(path[0], target)
    return f"The file's entry {entry!r} fits: {call}"


def _loading_call(state_dict: str, target: str) -> str:
    return f"ptsave.load_state_dict(model, {state_dict})" if target == "model" else state_dict
