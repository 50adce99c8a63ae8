"""Fills dicts and lists of tensors in place, from a state dict with the same keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

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


def load_mapping(
    target: Mapping[Any, Any], saved: Any, strict: bool, copier: Copier
) -> TorchsIncompatibleKeys:
    """Fill the tensors of `target` with those under the same keys of `saved`.

    Values that are no tensors are replaced, and nothing changes unless everything fits. Returns the
    dotted paths of entries that only `target` or only `saved` has.
    """
    filling = check_mapping(target, saved, strict)
    plainly = not modes_are_active()
    for tensor, source in filling.uninitialized:
        copier.show({"": source})  # a tensor that has a shape must have values, too
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
    # The target must not get values that are still to be read, because reading may fail.
    values = [value for _, _, value in filling.replacements]
    if tensors_in(values):
        copier.show({"": values})
    for container, key, value in filling.replacements:
        container[key] = value
    return TorchsIncompatibleKeys(filling.missing, filling.unexpected)


def check_mapping(target: Mapping[Any, Any], saved: Any, strict: bool) -> _Filling:
    """Return the plan of `load_mapping`, or raise its error, changing nothing."""
    if not isinstance(saved, Mapping):
        raise no_mapping_error(saved)
    filling = _Filling()
    filling.compare(target, saved, "")
    raise_load_errors(target, filling.errors, filling.missing, filling.unexpected, strict=strict)
    return filling


class _Filling:
    """Copies and replacements for one state dict, and the errors found in it."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.uninitialized: list[tuple[Any, Tensor]] = []  # they get their shapes first
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
                        f"{path} is uninitialized in the file, and has a shape in the target"
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
                f"{path} is a {type(value).__name__}, which is no value to be replaced: restore it "
                "as a target of its own"
            )
        elif isinstance(target, (dict, list)):
            self.replacements.append((target, key, saved))
        else:
            self.errors.append(f"{path} cannot be replaced in a {type(target).__name__}")
