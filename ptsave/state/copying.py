"""Copies the tensors of a state dict into a module or an optimizer, at once or later.

Loading a state dict decides on sources and targets; a `Copier` decides *when* to copy. A restore
from a file collects the copies, so that it can check everything before the first byte of a target
changes. A plain tensor is only numbers in memory. Copying it runs no code of users, so it can
happen at any time. All other entries are left to torch's code. Errors are in the words of
:meth:`torch.nn.Module.load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Size, Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.overrides import is_tensor_like

from ptsave import _C
from ptsave._C import copies_plainly
from ptsave.support.torch_names import untyped_of
from ptsave.tree.containers import walk

# Key, shape in the state dict and shape in the module.
Mismatch: TypeAlias = "tuple[str, Size, Size]"


PLAIN_TYPES = frozenset({Tensor, Parameter})

# Dtypes of quantized tensors.  Other dtypes smaller than a byte are saved as bytes.
_SUB_BYTE_DTYPES = frozenset({torch.quint4x2, torch.quint2x4})


class Replacement(NamedTuple):
    """A tensor that replaces a buffer once it holds the values of its source.

    `new` and `source` are both None for a buffer that becomes None.
    """

    buffers: dict[str, Tensor | None]
    name: str
    new: Tensor | None
    source: Tensor | None

    def make(self) -> None:
        """Put the new tensor into the dict of buffers."""
        self.buffers[self.name] = self.new


class Copier:
    """Decides when tensors of a state dict are copied; this class copies at once, as torch does.

    With a subclass, the tensors of the state dict may not have values yet.
    """

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Copy each source into its target, as ``copy_`` does under no_grad.

        Only for pairs (target, source) whose copies cannot fail: strided tensors of exactly torch's
        own types, of one shape, on real devices.
        """
        n_done = _C.copy_small(copies, 0)
        if n_done < len(copies):
            with torch.no_grad():
                while n_done < len(copies):
                    target, source = copies[n_done]
                    target.copy_(source)
                    n_done = _C.copy_small(copies, n_done + 1)

    def replace(self, replacement: Replacement) -> None:
        """Copy `source` into `new`, as by `copy`, and then make `new` the buffer.

        If the values do not arrive, the buffer stays as it is.
        """
        if replacement.new is not None and replacement.source is not None:
            self.copy([(replacement.new, replacement.source)])
        replacement.make()

    def note_assigned(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because they themselves become parts of a module."""

    def convert(self, source: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Return ``source.to(dtype=dtype, device=device)``; that is `source` if nothing changes."""
        return source.to(dtype=dtype, device=device)

    def lend(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because other people's code will only look at them.

        No copies have been passed to `copy` yet. A copier whose tensors are stand-ins replaces the
        stand-ins in the dict.
        """

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because other people's code is about to run.

        That code may also look at every target, so all copies passed to `copy` must be done when
        this returns. A copier whose tensors are stand-ins replaces the stand-ins in the dict.
        """

    def show_dict(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Do what `show` does, and return a dict that other people's code gets and may edit.

        The returned dict may delay reading an entry until that code asks for it.
        """
        self.show(entries)
        return entries


class LookOnly(Copier):
    """A `Copier` for a trial run: it copies nothing, and `copier` lends values when shown."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Do nothing."""

    def replace(self, replacement: Replacement) -> None:
        """Do nothing."""

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        self._copier.lend(state_dict)


def overlapping(spans: Iterable[tuple[Any, int, int, int]]) -> set[int]:
    """Return the keys of the spans (memory, begin, end, key) that overlap another span."""
    found: set[int] = set()
    memory, end, last = None, 0, 0
    for this_memory, begin, this_end, key in sorted(spans):
        if this_memory != memory:
            memory, end = this_memory, begin
        if begin < end:
            found |= {last, key}
        if this_end > end:
            end, last = this_end, key
    return found


def tensors_in(obj: Any) -> list[Tensor]:
    """Return the tensors in nested containers and their attributes, and a tensor for each storage.

    Uninitialized parameters and buffers are left out, because they have no memory.
    """
    found: list[Tensor] = []
    for value in walk(obj, (Mapping, list, tuple, set, frozenset), keys=True):
        if isinstance(value, Tensor):
            if not is_lazy(value):
                found.append(value)
        elif isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            untyped = untyped_of(value) if isinstance(value, torch.TypedStorage) else value
            found.append(torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped))
    return found


def shares_bytes(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share bytes, so that torch cannot copy the tensor."""
    return tensor.dtype in _SUB_BYTE_DTYPES


class ModulePlan:
    """Copies of entries into the tensors of one module, and the errors of the other entries."""

    __slots__ = ("copies", "errors", "mismatched", "missing")

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.missing: list[str] = []
        self.mismatched: list[Mismatch] = []
        self.errors: list[str] = []


def plan_module(
    own: Mapping[str, Tensor],
    entries: Mapping[str, Any],
    prefix: str,
    *,
    skip_mismatched: bool,
    copies: bool,
) -> ModulePlan | None:
    """Return the copies that torch would make, or None if not all of them copy plain tensors.

    `own` are the module's parameters and persistent buffers. With `skip_mismatched`, entries of
    other shapes are left out instead of being errors. With `copies`, entries will really be copied,
    so dtypes that torch cannot copy are errors.
    """
    plan = ModulePlan()
    for name, target in own.items():
        key = prefix + name
        if key not in entries:
            plan.missing.append(key)
            continue
        source = entries[key]
        if copies_plainly(target, source):
            plan.copies.append((target, source))
        elif not _plan_exception(plan, key, target, source, skip_mismatched):
            if not (copies and are_plain(target, source) and shares_bytes(target)):
                return None
            plan.errors.append(no_copy_message(key, target))
    return plan


def _plan_exception(
    plan: ModulePlan, key: str, target: Tensor, source: Any, skip_mismatched: bool
) -> bool:
    """Plan an entry that is not simply copied; return False if only torch's code can handle it."""
    if type(target) not in PLAIN_TYPES or is_lazy(target):
        return False
    if not is_tensor_like(source):
        plan.errors.append(no_tensor_message(key, source))
        return True
    if type(source) not in PLAIN_TYPES:
        return False
    if differ(target, source):
        if skip_mismatched:
            plan.mismatched.append((key, source.shape, target.shape))
        else:
            plan.errors.append(mismatch_message(key, target, source))
        return True
    if source.shape != target.shape and copies_plainly(target, source[0]):
        plan.copies.append((target, source[0]))  # a scalar, as torch 0.3 saved it
        return True
    return False


def are_plain(target: Any, source: Any) -> bool:
    """Return whether `target` and `source` are tensors of exactly torch's own types."""
    return type(target) in PLAIN_TYPES and type(source) in PLAIN_TYPES


def differ(target: Tensor, source: Any) -> bool:
    """Return whether torch would report a size mismatch.

    Raises torch's RuntimeError if `source` is uninitialized, because it has no shape.
    """
    if not is_tensor_like(source) or is_lazy(target):
        return False
    one_element = len(target.shape) == 0 and tuple(source.shape) == (1,)  # as torch 0.3 saved it
    return not one_element and bool(source.shape != target.shape)


class Shaped(Protocol):
    """A tensor, or a stand-in that knows its shape."""

    @property
    def shape(self) -> torch.Size: ...


def no_mapping_error(state_dict: Any) -> TypeError:
    """Return torch's error for a state dict that is not a mapping."""
    return TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")


def no_tensor_message(key: str, source: Any) -> str:
    """Return torch's words for an entry that should be a tensor."""
    return (
        f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like '
        f"object from checkpoint but received {type(source)}"
    )


def failure_message(key: str, target: Shaped, source: Shaped, error: Exception) -> str:
    """Return torch's words for an entry that could not be copied."""
    return (
        f'While copying the parameter named "{key}", whose dimensions in the model are '
        f"{target.shape} and whose dimensions in the checkpoint are {source.shape}, an exception "
        f"occurred : {error.args}."
    )


def mismatch_message(key: str, target: Shaped, source: Shaped) -> str:
    """Return torch's words for shapes that differ."""
    return (
        f"size mismatch for {key}: copying a param with shape {source.shape} from "
        f"checkpoint, the shape in current model is {target.shape}."
    )


def no_copy_message(key: str, target: torch.Tensor) -> str:
    """Return the message for a tensor that torch cannot copy into another one."""
    return (
        f'While copying the parameter named "{key}": torch has no copy for {target.dtype}. Load it '
        "with assign=True, or take it from ptsave.load()"
    )


def raise_load_errors(
    target: object,
    errors: list[str],
    missing: list[str],
    unexpected: list[str],
    *,
    strict: bool,
    noun: str = "key",
) -> None:
    """Raise one error for all problems, if any; `strict` adds missing and unexpected keys."""
    if strict:
        for kind, keys in (("Unexpected", unexpected), ("Missing", missing)):
            if len(keys) > 0:
                names = ", ".join(f'"{key}"' for key in keys)
                errors.insert(0, f"{kind} {noun}(s) in state_dict: {names}. ")
    if len(errors) > 0:
        reasons = "\n\t".join(errors)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {target.__class__.__name__}:\n\t{reasons}"
        )
