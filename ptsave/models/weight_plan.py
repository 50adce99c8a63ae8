"""Finds, before any tensor is read, which tensor of a model each stored tensor fills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ptsave import _C
from ptsave.models.packed_modules import PackedModules, Route, ShardId
from ptsave.models.shards import Entry, Shard
from ptsave.models.weight_parts import fits, parts_along
from ptsave.state.copying import PLAIN_TYPES, Mismatch, mismatch_message, raise_load_errors
from ptsave.state.lazy_buffers import lazy_buffer_hooks, new_buffer
from ptsave.state.renaming import Renaming
from ptsave.support.torch_modules import (
    buffers_of,
    having,
    non_persistent_buffers_of,
    pre_hooks_of,
    tensors_in,
)
from ptsave.support.torch_names import is_distributed_tensor
from ptsave.tree.extents import ADVICE, default_limit


class _Fields(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]
    duplicate_keys: list[str]
    unfilled_shards: dict[str, list[ShardId]]


class LoadedWeights(_Fields):
    """The names of tensors that did not fit when :func:`ptsave.load_model` filled a model.

    Attributes
    ----------
    missing_keys : list of str
        The model's parameters and buffers that the checkpoint does not have.
    unexpected_keys : list of str
        The checkpoint's tensors that the model does not have.
    duplicate_keys : list of str
        The checkpoint's tensors that compete with another one for the same parameter.
    unfilled_shards : dict of str to list
        For each incomplete packed parameter, by its name: the shard ids of its missing parts.
    mismatched_keys : list of (str, torch.Size, torch.Size)
        With `ignore_mismatched_sizes`, the tensors that were left out: name in the model, shape in
        the file, shape in the model.  It is not an item of this tuple.

    Examples
    --------
    >>> import ptsave
    >>> ptsave.LoadedWeights([], [], [], {})
    <All weights loaded>
    """

    mismatched_keys: list[Mismatch]

    def __new__(
        cls,
        missing_keys: list[str],
        unexpected_keys: list[str],
        duplicate_keys: list[str],
        unfilled_shards: dict[str, list[ShardId]],
        mismatched_keys: list[Mismatch] | None = None,
    ) -> LoadedWeights:
        names: LoadedWeights = super().__new__(
            cls, missing_keys, unexpected_keys, duplicate_keys, unfilled_shards
        )
        names.mismatched_keys = [] if mismatched_keys is None else mismatched_keys
        return names

    def __repr__(self) -> str:
        if not any(self) and not self.mismatched_keys:
            return "<All weights loaded>"
        named = self._asdict()
        if self.mismatched_keys:
            named["mismatched_keys"] = self.mismatched_keys
        fields = ", ".join(f"{name}={value!r}" for name, value in named.items())
        return f"{type(self).__name__}({fields})"


class ModuleLoadOptions(NamedTuple):
    """Options of `load_model`."""

    strict: bool
    ignore_mismatched_sizes: bool
    assign: bool
    device: torch.device | str | int | None
    dtype: torch.dtype | None
    progress: bool


class ModelTensors:
    """A model's parameters and buffers by name."""

    def __init__(
        self,
        model: nn.Module,
        modules: list[tuple[str, nn.Module]],
        lazy_buffers: LazyBuffers,
    ) -> None:
        self.by_name: dict[str, Tensor] = tensors_in(model, modules)  # under all of their names
        if lazy_buffers.changing:
            self.by_name = lazy_buffers.in_place_of(self.by_name)
        self.required = set(self.by_name).difference(_left_out_of_state_dicts(modules))
        self._ties: dict[str, list[str]] = {}
        homes = _homes_of([*self.by_name.values()])
        at: dict[int, list[tuple[Tensor, list[str]]]]
        at = {home: [] for home, n in Counter(homes).items() if n > 1}
        for (name, tensor), home in zip(self.by_name.items(), homes, strict=True) if at else ():
            if home in at:
                groups = [names for other, names in at[home] if _are_one(tensor, other)]
                if not groups:
                    groups.append([])
                    at[home].append((tensor, groups[0]))
                groups[-1].append(name)
                self._ties[name] = groups[-1]

    def tied_names(self, name: str) -> list[str]:
        """Return all names of the (perhaps tied) tensor `name`, in the model's order."""
        return self._ties.get(name, [name])

    def groups(self) -> Iterator[list[str]]:
        """Yield, for each tensor, the list of all of its names."""
        for name in self.by_name:
            names = self._ties.get(name)
            if names is None:
                yield [name]
            elif names[0] == name:
                yield names


def _left_out_of_state_dicts(modules: list[tuple[str, nn.Module]]) -> Iterator[str]:
    for prefix, module in having(modules, non_persistent_buffers_of):
        for name in non_persistent_buffers_of(module):
            yield f"{prefix}.{name}" if prefix else name


def _homes_of(tensors: list[Tensor]) -> list[int]:
    """Return each tensor's address; a unique negative number for a tensor without memory."""
    return [
        (_address_of(tensor) if address is None else address) or -id(tensor)
        for tensor, address in zip(tensors, _C.addresses(tensors), strict=True)
    ]


def _address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or 0 if the tensor has no memory of its own."""
    if is_lazy(tensor) or tensor.is_meta or tensor.numel() == 0:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # the tensor has no memory of its own
        return 0


def _are_one(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors at one address are one object, or show the same elements."""
    return tensor is other or (
        (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
        and tensor.stride() == other.stride()
    )


def loaders_of(tensors: Mapping[str, Tensor]) -> dict[str, Callable[..., Any]]:
    """Return the ``weight_loader`` of each parameter that has one, by name."""
    return {
        name: loader
        for name, tensor in tensors.items()
        if callable(loader := getattr(tensor, "weight_loader", None))
    }


def takes_slices(loader: Callable[..., Any]) -> bool:
    """Return whether a loader gets a `WeightSlice` instead of a tensor."""
    return bool(getattr(loader, "takes_slices", False))


class Delivery(NamedTuple):
    """A stored tensor (`entry`), and the name of the model's tensor that it fills."""

    entry: Entry
    name: str
    shard_id: ShardId | None  # the part that it fills; None: all of the tensor
    # Dimension and index at which the part begins, if the shapes determine them.  None: the
    # weight_loader places the part.
    place: tuple[int, int] | None = None


class WeightPlan:
    """Lists the model's tensors that entries fill, in file order; `report` has the other names."""

    def __init__(
        self,
        tensors: ModelTensors,
        packed: PackedModules,
        shards: Sequence[Shard],
        entries: Sequence[Entry],
        renaming: Renaming,
        *,
        skip_mismatched: bool,
    ) -> None:
        self.tensors = tensors
        self.packed = packed
        self.shards = shards
        self.entries = entries
        self.renaming = renaming
        self.deliveries: list[Delivery] = []
        self.left_out: list[Delivery] = []  # their shapes do not fit
        self.names: set[str] = set()  # of all entries, as `renaming` changes them
        self.report = LoadedWeights([], [], [], {})
        self._received: dict[str, dict[ShardId | None, Delivery]] = {}  # by the tensor's name
        self._packed_names: dict[str, str] = {}
        self._superseded: set[int] = set()  # id() of deliveries that later ones replace
        self.loaders = loaders_of(tensors.by_name)
        for entry in entries:
            name = renaming(entry.name) if renaming.changes else entry.name
            if name is not None:
                self.names.add(name)
                self._add(entry, name)
        if self._superseded:
            self.deliveries = [each for each in self.deliveries if id(each) not in self._superseded]
        self._leave_out_tied_copies()
        self._report_what_is_missing()
        self._place_parts()
        if skip_mismatched:  # otherwise, wrong shapes are errors
            self._leave_out_mismatched()

    def _add(self, entry: Entry, name: str) -> None:
        if self.packed.places:
            for routes in self.packed.candidates(name):
                if self._deliver(entry, routes):
                    return
        if name in self.tensors.by_name:
            # Delivery(...) takes twice as long.
            self._note_delivery(tuple.__new__(Delivery, (entry, name, None, None)), None)
            return
        for routes in self.packed.loose_candidates(name):
            if self._deliver(entry, routes):
                return
        self.report.unexpected_keys.append(entry.name)

    def _deliver(self, entry: Entry, routes: Iterable[Route]) -> bool:
        """Note the tensors of the model that an entry fills; return False if there are none."""
        found = [route for route in routes if route.target in self.tensors.by_name]
        for target, shard_id, packed in found:
            self._note_delivery(Delivery(entry, target, shard_id), packed)
        return bool(found)

    def _note_delivery(self, delivery: Delivery, packed: str | None) -> None:
        self.deliveries.append(delivery)
        received = self._received.get(delivery.name)
        if packed is not None and delivery.shard_id is not None:
            self._packed_names[delivery.name] = packed
        if received is None:
            self._received[delivery.name] = {delivery.shard_id: delivery}
            return
        other = received.get(delivery.shard_id)
        if other is not None:
            self._superseded.add(id(other))
            self.report.duplicate_keys.append(other.entry.name)
        elif delivery.shard_id is None or None in received:
            # One entry fills all of the tensor, and one a part: the later one overwrites it.
            self.report.duplicate_keys.append(delivery.entry.name)
        received[delivery.shard_id] = delivery

    def _leave_out_tied_copies(self) -> None:
        """If entries have several names of one tied tensor, keep only the last, as torch does."""
        left_out: set[Delivery] = set()
        for names in self.tensors.groups():
            if len(names) == 1:
                continue
            delivered = [name for name in names if name in self._received]
            for name in delivered[:-1]:
                kept = self._received[delivered[-1]]
                parts = self._received[name].items()
                left_out.update(part for shard_id, part in parts if shard_id in kept)
        if left_out:
            self.deliveries = [item for item in self.deliveries if item not in left_out]

    def _report_what_is_missing(self) -> None:
        for names in self.tensors.groups():
            if None in self._received.get(names[0], ()):
                continue  # an entry fills all of the tensor
            received = {shard_id for name in names for shard_id in self._received.get(name, ())}
            packed = next((name for name in names if name in self._packed_names), None)
            if not received:
                missing = (name for name in names if name in self.tensors.required)
                self.report.missing_keys.extend(missing)
            elif packed is not None and None not in received:
                wanted = self.packed.shard_ids(self._packed_names[packed])
                absent = [shard_id for shard_id in wanted if shard_id not in received]
                if absent:
                    self.report.unfilled_shards[packed] = absent

    def _place_parts(self) -> None:
        """For each packed parameter that has no loader, place its parts one after another."""
        parts: dict[str, list[Delivery]] = {}
        for delivery in self.deliveries:
            if delivery.shard_id is not None and delivery.name not in self.loaders:
                parts.setdefault(delivery.name, []).append(delivery)
        placed: dict[int, Delivery] = {}  # by the id() of the delivery that it replaces
        for name, group in parts.items():
            order = self.packed.shard_ids(self._packed_names[name])
            ranks = {shard_id: rank for rank, shard_id in enumerate(order)}
            group.sort(key=lambda each: ranks.get(each.shard_id, 0))  # type: ignore[arg-type]
            target = self.tensors.by_name[name]
            places: Sequence[tuple[int, int]] | None = None
            if not is_lazy(target) and len(group) == len(order):
                places = parts_along(target.shape, tuple(each.entry.shape for each in group))
            for each, place in zip(group, places or (), strict=False):
                placed[id(each)] = Delivery(each.entry, name, each.shard_id, place)
        if placed:
            self.deliveries = [placed.get(id(each), each) for each in self.deliveries]

    def _leave_out_mismatched(self) -> None:
        left_out = {each.name for each in self.deliveries if self._is_mismatched(each)}
        for each in self.deliveries:
            if each.name in left_out:
                shape = self.tensors.by_name[each.name].shape
                self.report.mismatched_keys.append((each.name, each.entry.shape, shape))
        self.left_out = [each for each in self.deliveries if each.name in left_out]
        self.deliveries = [each for each in self.deliveries if each.name not in left_out]

    def _is_mismatched(self, delivery: Delivery) -> bool:
        target = self.tensors.by_name[delivery.name]
        if delivery.name in self.loaders or delivery.place is not None or is_lazy(target):
            return False
        if delivery.shard_id is not None:
            return delivery.name not in self.report.unfilled_shards
        return not fits(target.shape, delivery.entry.shape)

    def tied_names(self) -> dict[str, list[str]]:
        """Return all names of each tied tensor that is filled; the key is its delivery's `name`."""
        return {
            each.name: names
            for each in self.deliveries
            if len(names := self.tensors.tied_names(each.name)) > 1
        }

    def check(self, model: nn.Module, *, strict: bool) -> None:
        """Raise one RuntimeError that lists every error; with `strict`, also names that do not fit.

        Wrong shapes are always errors.  It is also always an error if neither a loader nor the
        shapes determine where a part of a packed parameter belongs.
        """
        errors = [
            error
            for delivery in self.deliveries
            if not self._fits_as_it_is(delivery) and (error := self._error_of(delivery))
        ]
        if strict:
            errors[:0] = self._report_errors()
        missing, unexpected = self.report.missing_keys, self.report.unexpected_keys
        raise_load_errors(model, errors, missing, unexpected, strict=strict)

    def _report_errors(self) -> Iterator[str]:
        for name, absent in self.report.unfilled_shards.items():
            parts = ", ".join(repr(shard_id) for shard_id in absent)
            yield f'Packed parameter "{name}" lacks shard(s) {parts}. '
        if self.report.duplicate_keys:
            names = ", ".join(f'"{name}"' for name in self.report.duplicate_keys)
            yield f"Key(s) loaded twice: {names}. "

    def _fits_as_it_is(self, delivery: Delivery) -> bool:
        """Return whether a quick check shows that the entry fits; if not, it may still fit."""
        entry, name, shard_id, place = delivery
        if name in self.loaders:
            return entry.nbytes <= entry.stored_nbytes
        if shard_id is not None:
            return place is not None
        target = self.tensors.by_name[name]
        return type(target) in PLAIN_TYPES and target.shape == entry.shape

    def _error_of(self, delivery: Delivery) -> str | None:
        target, entry = self.tensors.by_name[delivery.name], delivery.entry
        where = f"(file {entry.shard.path}, tensor {entry.name})"
        if (loader := self.loaders.get(delivery.name)) is not None:
            # The loader checks shapes.  But before it is called, the tensor needs memory.
            if takes_slices(loader) or entry.nbytes <= default_limit(entry.stored_nbytes):
                return None
            return (
                f'"{delivery.name}" would take {entry.nbytes:,} bytes, but is stored in '
                f"{entry.stored_nbytes:,}: {ADVICE} {where}"
            )
        if is_lazy(target):
            return f'"{delivery.name}" is lazy: it has no shape yet, and no weight_loader {where}'
        if delivery.shard_id is not None:
            return (
                f'Packed parameter "{delivery.name}" has no weight_loader to put shard '
                f"{delivery.shard_id!r} in its place, and its shards together do not make a "
                f"tensor of shape {target.shape}: this shard has shape {entry.shape} {where}"
            )
        if not fits(target.shape, entry.shape):
            return f"{mismatch_message(delivery.name, target, entry)} {where}"
        return None


# ------------------------------------------------------------------------------- replaced tensors


@dataclass(eq=False, repr=False)
class _LazyBuffer:
    """One buffer, under all of its names in the model."""

    module: nn.Module
    name: str
    full_names: list[str] = field(default_factory=list)
    entry: Entry | None = None  # None: the checkpoint lacks the buffer
    new: Tensor | None = None

    @property
    def stays(self) -> bool:
        """Whether the buffer is filled in place, because it has the entry's shape."""
        present = buffers_of(self.module)[self.name]
        return self.entry is not None and present is not None and present.shape == self.entry.shape

    def like(self) -> Tensor | None:
        """Return one element expanded to the entry's shape, in its dtype; None without an entry."""
        if self.entry is None:
            return None
        return torch.empty((), dtype=self.entry.dtype, device="cpu").expand(self.entry.shape)


class LazyBuffers:
    """A model's lazy buffers whose shape differs in a checkpoint, or that the checkpoint lacks.

    New tensors replace these buffers only after the tensors have been filled, so a failed load
    leaves the buffers as they were. `modules` lists each module under all of its names.
    """

    def __init__(
        self,
        modules: list[tuple[str, nn.Module]],
        entries: Sequence[Entry],
        renaming: Renaming,
    ) -> None:
        found: dict[tuple[int, str], _LazyBuffer] = {}
        by_name: dict[str | None, Entry] = {}
        for prefix, module in having(modules, pre_hooks_of):
            for hook in lazy_buffer_hooks(module):
                # If two entries have the same new name, the later one is used.
                by_name = by_name or {renaming(entry.name): entry for entry in entries}
                if hook.name in buffers_of(module):
                    key = (id(module), hook.name)
                    lazy = found.setdefault(key, _LazyBuffer(module, hook.name))
                    full_name = f"{prefix}.{hook.name}" if prefix else hook.name
                    lazy.full_names.append(full_name)
                    lazy.entry = by_name.get(full_name, lazy.entry)
        self.changing = [lazy for lazy in found.values() if not lazy.stays]

    def in_place_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` with changing lazy buffers in their new shapes, still without values."""
        tensors = dict(tensors)
        for lazy in self.changing:
            like = lazy.like()
            for name in lazy.full_names:
                tensors.pop(name, None)
                if like is not None:
                    tensors[name] = like
        return tensors

    def allocate(self) -> dict[str, Tensor]:
        """Allocate the new buffers on the model's devices, and return them by name."""
        tensors = {}
        for lazy in self.changing:
            like = lazy.like()
            if like is not None:
                lazy.new = new_buffer(lazy.module, buffers_of(lazy.module)[lazy.name], like)
                tensors.update(dict.fromkeys(lazy.full_names, lazy.new))
        return tensors

    def put(self) -> None:
        """Put the new tensors, which now hold their values, into the modules."""
        for lazy in self.changing:
            buffers_of(lazy.module)[lazy.name] = lazy.new


class Assignment:
    """Replaces tensors like ``load_state_dict(assign=True)``; `dtype` replaces floating dtypes."""

    def __init__(self, model: nn.Module, plan: WeightPlan, dtype: torch.dtype | None) -> None:
        self._model = model
        self._tied_names = plan.tensors.tied_names
        self._new_dtypes: dict[str, torch.dtype] = {}  # by one name of each tensor to replace
        for delivery in plan.deliveries:
            name, stored = delivery.name, delivery.entry.dtype
            tensor = plan.tensors.by_name[name]
            is_filled = name in plan.loaders or delivery.place is not None
            if is_filled or is_distributed_tensor(tensor):
                continue
            new_dtype = dtype if dtype is not None and stored.is_floating_point else stored
            if tensor.requires_grad and not (new_dtype.is_floating_point or new_dtype.is_complex):
                raise RuntimeError(
                    f'"{name}" requires gradients and cannot become a tensor of {new_dtype}: load '
                    "it without assign=True"
                )
            self._new_dtypes[name] = new_dtype
        self.names = {tied for name in self._new_dtypes for tied in self._tied_names(name)}
        self._new: dict[str, Tensor] = {}

    def allocate(
        self, tensors: Mapping[str, Tensor], device: torch.device | str | int | None
    ) -> dict[str, Tensor]:
        """Return new, uninitialized tensors by name, on `device` or on the old tensors' devices."""
        for name, dtype in self._new_dtypes.items():
            old = tensors[name]
            place = device if device is not None else "cpu" if old.is_meta else old.device
            new = torch.empty(old.shape, dtype=dtype, device=place)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            self._new.update(dict.fromkeys(self._tied_names(name), new))
        return self._new

    def put(self) -> None:
        """Put the new tensors, which now hold their values, into the model."""
        for name, new in self._new.items():
            owner, _, own_name = name.rpartition(".")
            setattr(self._model.get_submodule(owner), own_name, new)
