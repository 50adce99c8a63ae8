"""Loads open files into models that have hooks or other code, as `load_state_dict` would.

The state dict has stand-ins: tensors without memory. A copy from a stand-in becomes a read from the
file. Before code of a module runs, real values replace the stand-ins of the module's own tensors.
The tensors of the module's children are read when the code asks for them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ptsave.archive.spans import unfilled_tensors
from ptsave.models.filling import Filling, Item
from ptsave.models.shards import Entry, Read, ShardReader
from ptsave.models.weight_parts import Part, fits
from ptsave.models.weight_plan import Delivery, ModuleLoadOptions, WeightPlan
from ptsave.state.copying import Copier, Mismatch, Replacement
from ptsave.state.renaming import renamed_metadata
from ptsave.support.torch_modules import METADATA, IncompatibleKeys, tensors_in
from ptsave.support.torch_names import is_distributed_tensor

if TYPE_CHECKING:
    from ptsave.models.group_weights import GroupFilling


class ModuleLoad:
    """Loads a state dict of stand-ins into a model; `names` are the keys that come from the files.

    Parameters with a ``weight_loader``, parts of packed parameters, DTensors and non-persistent
    buffers are not in the state dict: their entries stay in `plan.deliveries`.
    """

    def __init__(self, model: nn.Module, plan: WeightPlan, options: ModuleLoadOptions) -> None:
        self._model = model
        self._plan = plan
        self._options = options
        by_name = [each for each in plan.deliveries if not _is_in_state_dict(plan, each)]
        self._copier = ShardCopier()
        self._state_dict: OrderedDict[str, Any] = OrderedDict()
        left_out = [each for each in plan.left_out if not _is_in_state_dict(plan, each)]
        self._add_stand_ins({each.entry for each in (*by_name, *left_out)})
        plan.deliveries = by_name
        names_left_out = {each.name for each in left_out}
        plan.report.mismatched_keys[:] = [
            each for each in plan.report.mismatched_keys if each[0] in names_left_out
        ]
        plan.report.missing_keys.clear()
        plan.report.unexpected_keys.clear()
        plan.check(model, strict=options.strict)
        self.names = set(self._state_dict)
        self._elsewhere = self._names_elsewhere()
        self._add_present(self._state_dict)
        from ptsave.state.modules import check_module

        ignores = options.ignore_mismatched_sizes
        self._copier.check_only = True
        check_module(
            model, self._state_dict, options.strict, self._copier, ignore_mismatched_sizes=ignores
        )
        self._copier.check_only = False

    def _add_stand_ins(self, by_name: set[Entry]) -> None:
        """Add extra state to the state dict, and stand-ins for all entries not in `by_name`."""
        plan = self._plan
        entries = [entry for entry in plan.entries if entry not in by_name]
        names: dict[Entry, list[str]] = {}
        for each in plan.deliveries:
            if each.entry not in by_name:
                names.setdefault(each.entry, []).append(each.name)
        for entry in entries:
            own_name = plan.renaming(entry.name)
            for name in names.get(entry, [own_name]) if own_name is not None else ():
                target = plan.tensors.by_name.get(name)
                shape = entry.shape
                if target is not None and not is_lazy(target) and fits(target.shape, shape):
                    shape = target.shape
                self._state_dict[name] = self._copier.stand_in(name, entry, shape)
        metadata: OrderedDict[str, Any] = OrderedDict()
        for shard in plan.shards:
            for key in shard.objects:
                new_key = plan.renaming(key)
                if new_key is not None:
                    self._state_dict[new_key] = shard.objects[key]
            metadata.update(renamed_metadata(shard.metadata, plan.renaming))
        if metadata:
            setattr(self._state_dict, METADATA, metadata)

    def _names_elsewhere(self) -> list[str]:
        """Return the names of tensors that `plan.deliveries`, and not the state dict, fills."""
        tensors = self._plan.tensors
        filled = {each.name for each in self._plan.deliveries}.union(self._state_dict)
        groups = (group for group in tensors.groups() if not filled.isdisjoint(group))
        names = (name for group in groups for name in group)
        return [n for n in names if n not in self._state_dict and n in tensors.required]

    def _add_present(self, state_dict: OrderedDict[str, Any]) -> None:
        """Add the model's own tensors named in `_elsewhere`, so that none counts as missing."""
        present = tensors_in(self._model)
        state_dict.update((name, present[name]) for name in self._elsewhere)

    def items(self, filling: Filling | GroupFilling, reader: ShardReader) -> list[Item]:
        """Load the state dict, and return an `Item` for each copy that is still to be made."""
        from ptsave.state.modules import load_module

        self._add_present(self._state_dict)  # the move of the model may have replaced them
        self._copier.begin(filling, reader)
        keys: IncompatibleKeys | None = load_module(
            self._model,
            self._state_dict,
            self._options.strict,
            self._options.assign,
            self._copier,
            ignore_mismatched_sizes=self._options.ignore_mismatched_sizes,
            check_first=True,
        )
        self._copier.read_kept()
        report = self._plan.report
        if keys is not None:  # an overridden load_state_dict may return nothing
            report.missing_keys[:] = keys.missing_keys
            report.unexpected_keys[:] = keys.unexpected_keys
            mismatched: Sequence[Mismatch] = getattr(keys, "mismatched_keys", ())
            report.mismatched_keys.extend(mismatched)
        return self._copier.pending

    def is_filled(self, name: str) -> bool:
        """Return whether it is certain that the load gave this tensor of the model its values."""
        return (
            name in self._state_dict or name in self._plan.tensors.required
        ) and name not in self._plan.report.missing_keys

    def finish(self) -> None:
        """Put new buffers, which are filled by now, into their modules."""
        self._copier.put()


def _is_in_state_dict(plan: WeightPlan, delivery: Delivery) -> bool:
    tensor = plan.tensors.by_name[delivery.name]
    return (
        delivery.shard_id is None
        and delivery.name not in plan.loaders
        and delivery.name in plan.tensors.required
        and not is_distributed_tensor(tensor)
    )


class _ReadWhenAsked(OrderedDict[str, Any]):
    """A state dict for a model's code; when the code takes a stand-in, `read` gets its values."""

    def __init__(self, entries: Mapping[str, Any], read: Callable[[dict[str, Any]], None]) -> None:
        self._read = read
        super().__init__()
        for key, value in entries.items():
            super().__setitem__(key, value)

    def unread_items(self) -> Iterator[tuple[str, Any]]:
        """Yield all keys and values without reading; values not read so far are stand-ins."""
        return ((key, super(_ReadWhenAsked, self).__getitem__(key)) for key in self)

    def read_all(self) -> None:
        """Read all values that were not read so far."""
        found = dict(self.unread_items())
        self._read(found)
        for key, value in found.items():
            super().__setitem__(key, value)

    def __getitem__(self, key: str) -> Any:
        found = {key: super().__getitem__(key)}
        self._read(found)
        super().__setitem__(key, found[key])
        return found[key]

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self, last: bool = True) -> tuple[str, Any]:
        key = next(reversed(self) if last else iter(self), None)
        return super().popitem(last) if key is None else (key, self.pop(key))

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def items(self) -> Any:
        return ItemsView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def copy(self) -> Any:
        return OrderedDict(self.items())

    def __eq__(self, other: object) -> bool:
        return bool(self.copy() == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as for any dict

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


class ShardCopier(Copier):
    """A `Copier` for stand-ins of tensors in open files.

    `lend` and `show` replace the stand-ins in a dict by values, which live as long as the dict.
    `pending` has the copies that are not made yet. With `check_only`, nothing is read, because a
    check does not look at values.
    """

    def __init__(self) -> None:
        self.pending: list[Item] = []
        self.check_only = False
        self._stand_ins: dict[int, tuple[Tensor, str, Entry]] = {}
        self._replacements: list[Replacement] = []
        self._shown: list[weakref.ref[_ReadWhenAsked]] = []
        self._filling: Filling | GroupFilling | None = None
        self._reader: ShardReader | None = None

    def stand_in(self, name: str, entry: Entry, shape: torch.Size) -> Tensor:
        """Return a stand-in for an entry: a tensor without memory."""
        (tensor,) = unfilled_tensors([(entry.dtype, shape)])
        self._stand_ins[id(tensor)] = (tensor, name, entry)
        return tensor

    def begin(self, filling: Filling | GroupFilling, reader: ShardReader) -> None:
        """Use `filling` and `reader` for all reads from now on."""
        self._filling = filling
        self._reader = reader

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in copies:
            found = self._stand_ins.get(id(source))
            if found is not None:
                _, name, entry = found
                self.pending.append(
                    Item(entry, name, target.detach(), Part(entry.shape), entry.nbytes)
                )
            elif target is not source:
                places = {item.target.data_ptr() for item in self.pending}
                if target.data_ptr() in places:
                    self._finish()  # make the earlier copies first, so that this one stays
                super().copy([(target, source)])

    def replace(self, replacement: Replacement) -> None:
        if replacement.new is not None and replacement.source is not None:
            self.copy([(replacement.new, replacement.source)])
        self._replacements.append(replacement._replace(source=None))

    def note_assigned(self, state_dict: Mapping[Any, Any]) -> None:
        self.show(state_dict)

    def convert(self, source: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        shown = {"": source}
        self.lend(shown)
        return super().convert(shown[""], dtype, device)

    def lend(self, state_dict: Mapping[Any, Any]) -> None:
        if self.check_only:
            return
        assert isinstance(state_dict, dict)
        assert self._reader is not None
        reads: list[Read] = []
        for key, value in state_dict.items():
            found = self._stand_ins.get(id(value))
            if found is not None:
                tensor, _, entry = found
                state_dict[key] = torch.empty(tensor.shape, dtype=entry.dtype, device="cpu")
                reads.append(Read(entry, state_dict[key]))
        if reads:
            self._reader.read(reads)

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        if self.check_only:
            return
        self._finish()
        if METADATA not in state_dict:
            self.lend(state_dict)

    def show_dict(self, entries: dict[str, Any]) -> dict[str, Any]:
        if self.check_only:
            return entries
        self._finish()
        lazily = _ReadWhenAsked(entries, self.lend)
        self._shown.append(weakref.ref(lazily))
        return lazily

    def read_kept(self) -> None:
        """Read all values of the dicts that `show_dict` has returned and that are still in use."""
        for reference in self._shown:
            kept = reference()
            if kept is not None:
                kept.read_all()
        self._shown.clear()

    def put(self) -> None:
        """Put new buffers, which are filled by now, into their modules."""
        for replacement in self._replacements:
            replacement.make()
        self._replacements.clear()

    def _finish(self) -> None:
        assert self._filling is not None
        pending, self.pending = self.pending, []
        self._filling.fill(pending, is_all=False)
        self.put()
