"""Copies the tensors of a state dict into a module or an optimizer, at once or later.

The code that loads a state dict pairs source tensors with target tensors. A `Copier` decides *when*
to copy each source into its target. A restore from a file collects all pairs first, so that it can
check everything before a target changes. Copying a tensor of torch's own types runs no user code,
so ptsave copies such tensors itself, at any time. torch's code loads all other entries. Error
messages are the same as from :meth:`torch.nn.Module.load_state_dict`.
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

# A key, its shape in the state dict, and its shape in the module.
Mismatch: TypeAlias = "tuple[str, Size, Size]"


PLAIN_TYPES = frozenset({Tensor, Parameter})

# Quantized dtypes that pack several elements into a byte.  All other dtypes use whole bytes.
_SUB_BYTE_DTYPES = frozenset({torch.quint4x2, torch.quint2x4})


class Replacement(NamedTuple):
    """A tensor `new` that replaces a buffer after `source` has been copied into it.

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

    A subclass may copy later, and may be used for tensors whose values have not been read yet.
    """

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Copy each source into its target, as ``copy_`` does under no_grad.

        The pairs are (target, source). Callers pass only pairs whose copy cannot fail: strided
        tensors of exactly torch's own types, with equal shapes, not on the meta device.
        """
        n_done = _C.copy_small(copies, 0)
        if n_done < len(copies):
            with torch.no_grad():
                while n_done < len(copies):
                    target, source = copies[n_done]
                    target.copy_(source)
                    n_done = _C.copy_small(copies, n_done + 1)

    def replace(self, replacement: Replacement) -> None:
        """Copy the replacement's `source` into its `new`, and then make `new` the buffer.

        If the copy fails, the buffer keeps its old tensor.
        """
        if replacement.new is not None and replacement.source is not None:
            self.copy([(replacement.new, replacement.source)])
        replacement.make()

    def note_assigned(self, state_dict: Mapping[Any, Any]) -> None:
        """Make sure that tensors of `state_dict` get values; a module will get the tensors."""

    def convert(self, source: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Return ``source.to(dtype=dtype, device=device)``: `source` itself if nothing changes."""
        return source.to(dtype=dtype, device=device)

    def lend(self, state_dict: Mapping[Any, Any]) -> None:
        """Give the entries of `state_dict` their values, so that code outside ptsave can read them.

        Unlike `show`, this method may delay the copies that were passed to `copy`. If
        entries are stand-ins for tensors, the copier replaces them in `state_dict`.
        """

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        """Give the entries of `state_dict` their values, because code outside ptsave will run next.

        That code may also read every target, so this method makes all copies that were passed to
        `copy`. If entries are stand-ins for tensors, the copier replaces them in `state_dict`.
        """

    def show_dict(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Do what `show` does, and return a dict that code outside ptsave may read and edit.

        The returned dict may delay the reading of an entry until that code asks for the entry.
        """
        self.show(entries)
        return entries


class LookOnly(Copier):
    """A `Copier` for a trial run: it copies nothing, and its `show` calls `copier.lend`."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Do nothing."""

    def replace(self, replacement: Replacement) -> None:
        """Do nothing."""

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        self._copier.lend(state_dict)


def overlapping(spans: Iterable[tuple[Any, int, int, int]]) -> set[int]:
    """Return the keys of spans (memory, begin, end, key) that overlap within the same memory."""
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
    """Return all tensors in a nested object, and a byte tensor for each storage in it.

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
    """The copies into the tensors of one module, and the errors for entries that do not fit."""

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
    """Return a plan of the copies that torch would make, or None if only torch can make them.

    `own` holds the module's parameters and persistent buffers. With `skip_mismatched`, an entry of
    another shape than its target is left out instead of being an error. `copies` is False if
    entries will be assigned; if it is True, dtypes that torch cannot copy are errors.
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
    """A tensor, or a stand-in that has the tensor's shape."""

    @property
    def shape(self) -> torch.Size: ...


def no_mapping_error(state_dict: Any) -> TypeError:
    """Return torch's error for a state dict that is not a mapping."""
    return TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")


def no_tensor_message(key: str, source: Any) -> str:
    """Return torch's message for an entry that should be a tensor."""
    return (
        f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like '
        f"object from checkpoint but received {type(source)}"
    )


def failure_message(key: str, target: Shaped, source: Shaped, error: Exception) -> str:
    """Return torch's message for an entry that could not be copied."""
    return (
        f'While copying the parameter named "{key}", whose dimensions in the model are '
        f"{target.shape} and whose dimensions in the checkpoint are {source.shape}, an exception "
        f"occurred : {error.args}."
    )


def mismatch_message(key: str, target: Shaped, source: Shaped) -> str:
    """Return torch's message for an entry whose shape differs from the module's."""
    return (
        f"size mismatch for {key}: copying a param with shape {source.shape} from "
        f"checkpoint, the shape in current model is {target.shape}."
    )


def no_copy_message(key: str, target: torch.Tensor) -> str:
    """Return the message for a `target` whose dtype torch cannot copy."""
    return (
        f'While copying the parameter named "{key}": torch cannot copy {target.dtype} tensors. '
        "Load with assign=True, or use the tensor from ptsave.load()"
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
    """Raise one error for all `errors`; with `strict`, also for missing and unexpected keys."""
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
