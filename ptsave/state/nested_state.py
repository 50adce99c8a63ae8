"""Fills the tensors of nested dicts in place; finds the part of a checkpoint that fits a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ptsave._C import copies_plainly
from ptsave.state.copying import (
    Copier,
    mismatch_message,
    no_copy_message,
    no_mapping_error,
    no_tensor_message,
    raise_load_errors,
    shares_bytes,
    tensors_in,
)
from ptsave.support.torch_modules import IncompatibleKeys as TorchsIncompatibleKeys
from ptsave.support.torch_names import modes_are_active
from ptsave.tree.containers import items_of

_MAX_DEPTH = 3
_MAX_ENTRIES = 200  # in one container: the parts of a checkpoint are among its first entries
_PREFIXES = ("", "module.", "_orig_mod.", "model.")


def parts_with_tensors(obj: Mapping[Any, Any]) -> list[str]:
    """Return the paths of the dicts in a checkpoint that hold only tensors, such as ``model``."""
    return [
        ".".join(path)
        for path, part in _parts(obj)
        if path and part and all(isinstance(value, Tensor) for value in part.values())
    ]


def advice(obj: Any, wanted: Iterable[str], target: str = "model") -> str:
    """Return a sentence that names the part of a checkpoint to load, and the call that loads it.

    `wanted` holds the target's keys. The sentence is empty unless a part has over half of them, and
    more than the checkpoint itself. `target` is "model" for a module, or "target" for a dict.

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
    """Return a sentence that names the optimizer's part of a checkpoint, or an empty string.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1)])
    >>> optimizer_advice({"optim": sgd.state_dict(), "epoch": 3}, sgd)
    "The file's entry 'optim' fits: ptsave.load_checkpoint(path, optim=optimizer)"
    """
    if not isinstance(obj, Mapping):
        return ""
    from ptsave.state.optimizer_matching import is_name_keyed

    found = [
        (path, part)
        for path, part in _parts(obj)
        if path and (is_name_keyed(part) or ("param_groups" in part and "state" in part))
    ]
    n_params = sum(len(group["params"]) for group in optimizer.param_groups)
    for path, part in sorted(found, key=lambda each: _n_params(each[1]) != n_params):
        verb = "fits" if _n_params(part) == n_params else "is an optimizer's state"
        keys = "".join(f"[{key!r}]" for key in path)
        call = f"ptsave.load_optimizer_state_dict(optimizer, ptsave.load(path){keys})"
        if len(path) == 1:
            call = _checkpoint_call(path[0], "optimizer")
        return f"The file's entry {'.'.join(path)!r} {verb}: {call}"
    return ""


def _n_params(part: Mapping[Any, Any]) -> int:
    """Return an optimizer state dict's number of parameters; -1 if it has no list of groups."""
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
        where = f"the keys of the file's entry {entry!r}" if path else "the keys in the file"
        return f"More keys would match if {where} did not begin with {prefix!r}: " + _loading_call(
            f"ptsave.strip_prefix(ptsave.load(path){keys}, {prefix!r})", target
        )
    if len(path) > 1:
        call = _loading_call(f"ptsave.load(path){keys}", target)
    else:
        call = _checkpoint_call(path[0], target)
    return f"The file's entry {entry!r} fits: {call}"


def _loading_call(state_dict: str, target: str) -> str:
    return f"ptsave.load_state_dict(model, {state_dict})" if target == "model" else state_dict


# ------------------------------------------------------------------------ dicts as targets


def load_mapping(
    target: Mapping[Any, Any], saved: Any, strict: bool, copier: Copier
) -> TorchsIncompatibleKeys:
    """Fill the tensors of `target` with the values of the tensors in `saved`, key by key.

    Other values of `target` are replaced by those of `saved`. If an entry does not fit, nothing
    changes. Returns the dotted paths of entries that only `target` or only `saved` has.
    """
    filling = check_mapping(target, saved, strict)
    plainly = not modes_are_active()
    for tensor, source in filling.uninitialized:
        copier.show({"": source})  # a tensor that gets its shape here needs its values now
        with torch.no_grad():
            tensor.materialize(source.shape)
            tensor.copy_(source)
    for tensor, source in filling.tensors:
        if plainly and copies_plainly(tensor, source):
            copier.copy([(tensor, source)])
        else:
            copier.show({"": source})
            with torch.no_grad():
                tensor.copy_(source)
    # The target must not get values that have not been read yet, because reading may fail.
    values = [value for _, _, value in filling.replacements]
    if tensors_in(values):
        copier.show({"": values})
    for container, key, value in filling.replacements:
        container[key] = value
    return TorchsIncompatibleKeys(filling.missing, filling.unexpected)


def check_mapping(target: Mapping[Any, Any], saved: Any, strict: bool) -> _Filling:
    """Return the copies and replacements for `load_mapping`, or raise the same error."""
    if not isinstance(saved, Mapping):
        raise no_mapping_error(saved)
    filling = _Filling()
    filling.compare(target, saved, "")
    raise_load_errors(target, filling.errors, filling.missing, filling.unexpected, strict=strict)
    return filling


class _Filling:
    """The copies and replacements for one state dict, and the errors found in it."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.uninitialized: list[tuple[Any, Tensor]] = []  # targets get a shape first
        self.replacements: list[tuple[Any, Any, Any]] = []  # container, key, new value
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []

    def compare(self, target: Any, saved: Any, prefix: str) -> None:
        """Compare two containers of the same kind, entry by entry."""
        ours, theirs = dict(items_of(target)), dict(items_of(saved))
        self.missing += [f"{prefix}{key}" for key in ours if key not in theirs]
        self.unexpected += [f"{prefix}{key}" for key in theirs if key not in ours]
        for key, value in ours.items():
            if key in theirs:
                self._compare_entry(target, key, value, theirs[key], f"{prefix}{key}")

    def _compare_entry(self, target: Any, key: Any, value: Any, saved: Any, path: str) -> None:
        if isinstance(value, Tensor):
            if not isinstance(saved, Tensor):
                self.errors.append(no_tensor_message(path, saved))
            elif is_lazy(saved):
                if not is_lazy(value):
                    self.errors.append(
                        f"{path} is uninitialized in the file, but has a shape in the target"
                    )
            elif is_lazy(value):
                self.uninitialized.append((value, saved))
            elif value.shape != saved.shape:
                self.errors.append(mismatch_message(path, value, saved))
            elif shares_bytes(value):
                self.errors.append(no_copy_message(path, value))
            else:
                self.tensors.append((value, saved))
        elif any(
            isinstance(value, kind) and isinstance(saved, kind) for kind in (Mapping, (list, tuple))
        ):
            self.compare(value, saved, f"{path}.")
        elif callable(getattr(value, "load_state_dict", None)):
            self.errors.append(
                f"{path} is a {type(value).__name__}, which cannot be replaced as a value: restore "
                "it as a separate target"
            )
        elif isinstance(target, (dict, list)):
            self.replacements.append((target, key, saved))
        else:
            self.errors.append(f"{path} cannot be replaced in a {type(target).__name__}")
