"""Restores the tensors of a file directly into existing tensors.

The file is unpickled with storages whose bytes are not read yet.  Then the code that loads state
dicts tells a copier which tensors to copy where.  The bytes are read last: directly into the target
if the dtype and the device stay the same, or else into temporary memory first.  If the program
still uses a storage at the end, the storage itself is filled, too.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.serialization import config as torch_config

from ptsave import _C
from ptsave.archive.filling import fill, verifies_storages
from ptsave.archive.loading import LoadOptions, raise_with_advice, resolve_weights_only
from ptsave.archive.opening import open_archive
from ptsave.archive.reader import RecordReader
from ptsave.archive.unpickling import can_defer_reading, unpickle_unread
from ptsave.contents.loading import load_source
from ptsave.errors import add_note
from ptsave.sources.locations import describe, is_url_source
from ptsave.state.copying import Copier, Replacement, tensors_in
from ptsave.support.calls import ProgressCallback, has_others, progress_bar
from ptsave.support.torch_names import restricted_unpickler, storage_id_of

if TYPE_CHECKING:
    from ptsave.archive.group_archive import GroupArchive
    from ptsave.training.group_filling import GroupFiller
    from ptsave.training.options import RestoreOptions

_MAX_NAMED = 8


@contextmanager
def restoring(f: Any, options: RestoreOptions) -> Iterator[tuple[Any, RestoringCopier, Set[str]]]:
    """Yield the object in a file, a copier for its tensors, and the locations to move them to.

    When the `with` block ends without an exception, the copies are made, and each tensor of the
    object that is still in use gets its values.  The tensors are in CPU memory; the locations are
    the other devices on which torch would put them.  If the block ends with an exception, a note
    and the attribute `overwritten` of the exception name the entries that have new values.

    The tensors' bytes are read at the end of the block, when all copies are known.  The
    bytes are read before the block if tensors are assigned, only torch can read the file,
    unpickling may look at values, or `map_location` is a callable or a dict.
    """
    map_location, verify = options.map_location, options.verify
    restricted = resolve_weights_only(options.weights_only, None)  # may warn, so it is called once
    module = restricted_unpickler if restricted else pickle
    loading = LoadOptions(
        map_location,
        weights_only=restricted,
        verify=verify,
        progress=options.progress,
        wants_state=True,
    )
    storage_options = options.storage_options
    reader: RecordReader | None = None
    archive: GroupArchive | None = None
    with ExitStack() as stack:
        if has_others(options.process_group):
            from ptsave.archive.group_archive import group_archive, load_received

            archive = stack.enter_context(
                group_archive(
                    f, options.process_group, verify=verify, storage_options=storage_options
                )
            )
            if not options.assign and _can_defer(archive.reader, map_location, module):
                reader = archive.reader
        elif not (options.assign or is_url_source(f, storage_options)):
            reader = _reader_to_defer(f, map_location, module, verify)
            if reader is not None:
                stack.callback(reader.close)
        if reader is not None:
            yield from _restoring_from(reader, loading, module, archive)
        elif archive is not None:
            obj = load_received(archive, loading, waits=False)
            yield from _restoring_in_memory(obj, describe(f), archive)
        else:
            obj = load_source(f, loading, storage_options)
            yield from _restoring_in_memory(obj, describe(f), None)


def _restoring_in_memory(
    obj: Any, path: str, archive: GroupArchive | None
) -> Iterator[tuple[Any, MemoryCopier, Set[str]]]:
    """Yield what `restoring` yields, for an object whose tensors already have their values."""
    copier = MemoryCopier(archive)
    try:
        yield obj, copier, frozenset()
        copier.begin()
        copier.finish()
    except BaseException as error:
        if copier.changed:
            from ptsave.archive.damage import entries_in

            note_overwritten(error, entries_in(obj, copier.changed), path)
        raise


def _restoring_from(
    reader: RecordReader, options: LoadOptions, pickle_module: Any, archive: GroupArchive | None
) -> Iterator[tuple[Any, FileCopier, Set[str]]]:
    """Yield what `restoring` yields, for an archive whose bytes are read at the block's end."""
    with progress_bar(options.progress, "restoring", reader.engine.nbytes) as callback:
        reader.check_records()
        reader.allows_values = True
        copier = FileCopier(reader, archive, callback)
        locations: set[str] = set()
        try:
            obj = unpickle_unread(reader, pickle_module, locations)
        except pickle.UnpicklingError as error:
            raise_with_advice(error, pickle_module)
        holder = [obj]
        del obj
        try:
            if options.map_location is not None:
                locations = {str(options.map_location)} - {"cpu"}
                check_locations(locations)
            yield holder.pop(), copier, locations
            with reader.naming_what_needs_memory():
                copier.begin()
                copier.finish()
        except BaseException as error:
            if changed := {record.name for record in copier.changed()}:
                from ptsave.archive.damage import entries_using

                # If no entry is known, name records, because an empty list would mean no changes.
                note_overwritten(
                    error, entries_using(reader, changed) or sorted(changed), reader.path
                )
            raise
        reader.engine.release_storages()


def check_locations(locations: Set[str]) -> None:
    """Raise the error of `torch.load` for a device that is unknown or does not exist here."""
    for location in locations:
        torch.serialization.default_restore_location(torch.UntypedStorage(0), location)


def _reader_to_defer(
    f: Any, map_location: Any, pickle_module: Any, verify: bool
) -> RecordReader | None:
    """Return the open archive if its bytes can be read after it is unpickled; if not, None."""
    if torch_config.load.mmap and not isinstance(f, (str, os.PathLike)):
        return None
    try:
        reader = open_archive(f, verify=verify)
    except IsADirectoryError:
        return None
    if reader is None:
        return None
    with ExitStack() as stack:
        stack.callback(reader.close)
        known = reader.engine.find("constants.pkl") is None and reader.engine.all_stored
        if not (known and _can_defer(reader, map_location, pickle_module)):
            return None
        stack.pop_all()
        return reader


def _can_defer(reader: RecordReader, map_location: Any, pickle_module: Any) -> bool:
    if map_location is not None and type(map_location) not in (str, torch.device):
        return False
    return can_defer_reading(reader, pickle_module)


class RestoringCopier(Copier):
    """A copier for a restore; `_archive` is None unless a group of ranks restores together."""

    _archive: GroupArchive | None

    @property
    def is_shared(self) -> bool:
        """Whether other ranks restore from the same file together with this rank."""
        return self._archive is not None

    def agree(self) -> None:
        """Wait until all ranks have checked their targets."""
        if self._archive is not None:
            from ptsave.archive.group_archive import CHECKED

            self._archive.wait(CHECKED)

    def begin(self) -> None:
        """Wait until all ranks have noted which tensors to copy."""
        if self._archive is not None:
            from ptsave.archive.group_archive import PLANNED

            self._archive.wait(PLANNED)


class MemoryCopier(RestoringCopier):
    """A `Copier` for tensors in memory.

    `changed` has the ids (from `storage_id_of`) of all storages whose values have been copied to a
    target, or may have been.
    """

    def __init__(self, archive: GroupArchive | None) -> None:
        self.changed: set[int | None] = set()
        self._archive = archive
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._replacements: deque[Replacement] = deque()

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._copies += copies

    def replace(self, replacement: Replacement) -> None:
        self._replacements.append(replacement)

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        self.finish()
        self.note_assigned(state_dict)

    def note_assigned(self, state_dict: Mapping[Any, Any]) -> None:
        self.changed.update(map(storage_id_of, tensors_in(state_dict)))

    def finish(self) -> None:
        """Make all copies that were noted."""
        self.changed.update(storage_id_of(source) for _, source in self._copies)
        super().copy(self._copies)
        self._copies.clear()
        while self._replacements:
            replacement = self._replacements.popleft()
            if replacement.new is not None and replacement.source is not None:
                self.changed.add(storage_id_of(replacement.source))
                super().copy([(replacement.new, replacement.source)])
            replacement.make()


class EngineFiller:
    """Reads an archive's bytes into its storages and into targets, in this process."""

    def __init__(self, reader: RecordReader, *, verify: bool) -> None:
        self._reader, self._verify = reader, verify

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Note the copy ``target.copy_(source)``, which `fill` will make."""
        self._reader.engine.plan_copy(target, source)

    def is_filled(self, record: int) -> bool:
        """Return whether the bytes of a record have been read into its storage."""
        return self._reader.engine.is_filled(record)

    def changed(self) -> Collection[int]:
        """Return the numbers of the records whose bytes have reached a target, or may have."""
        return self._reader.engine.changed()

    def fill(self, records: Iterable[int], progress: ProgressCallback | None) -> None:
        """Make all copies that were noted, and fill the storages of these records."""
        fill(self._reader, records, verify=self._verify, progress=progress)


class FileCopier(RestoringCopier):
    """A `Copier` for tensors whose bytes are still in a file; their storages are not filled yet."""

    def __init__(
        self,
        reader: RecordReader,
        archive: GroupArchive | None,
        progress: ProgressCallback | None,
    ) -> None:
        self.reader = reader
        self._archive = archive
        self._filler: EngineFiller | GroupFiller
        verify = verifies_storages(reader)
        if archive is None:
            self._filler = EngineFiller(reader, verify=verify)
        else:
            from ptsave.training.group_filling import GroupFiller

            self._filler = GroupFiller(archive, verify=verify)
        self._progress = progress
        self._nbytes_done = 0
        self._shown: set[int] = set()  # records
        self._replacements: deque[tuple[Replacement, int | None]] = deque()  # with their records

    def changed(self) -> list[_C.Record]:
        """Return the records whose values were copied to a target, or that other code has seen."""
        numbers = self._shown.union(self._filler.changed())
        # While a replacement is pending, its record has changed no target.  But another entry may
        # use the same record, and may have changed one.
        unused = {record for _, record in self._replacements if record not in self._shown}
        changed = []
        for number in sorted(numbers):
            record = self.reader.engine.record(number)
            if number in unused:
                from ptsave.archive.damage import entries_using

                if len(entries_using(self.reader, {record.name})) == 1:
                    continue
            changed.append(record)
        return changed

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in copies:
            self._filler.copy(target, source)

    def replace(self, replacement: Replacement) -> None:
        record = None
        if replacement.new is not None and replacement.source is not None:
            record = self.reader.engine.record_of(replacement.source)
            self.copy([(replacement.new, replacement.source)])
        # Drop the source: at the end, all storages that are still in use are read.
        self._replacements.append((replacement._replace(source=None), record))

    def note_assigned(self, state_dict: Mapping[Any, Any]) -> None:
        self.show(state_dict)

    def convert(self, source: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        dtype = source.dtype if dtype is None else dtype
        if (dtype, device) == (source.dtype, source.device) or not self._is_unread(source):
            return source.to(dtype=dtype, device=device)
        # Use torch's conversion where it warns (imaginary parts are lost) or autograd records it.
        if (source.is_complex() and not dtype.is_complex) or source.requires_grad:
            self.show({"": source})
            return source.to(dtype=dtype, device=device)
        converted = torch.empty_like(source, dtype=dtype, device=device)
        self._filler.copy(converted, source)
        return converted

    def lend(self, state_dict: Mapping[Any, Any]) -> None:
        self._fill(self._records_of(state_dict))

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        records = self._records_of(state_dict)
        self._fill(records)
        self._shown |= records

    def _records_of(self, state_dict: Mapping[Any, Any]) -> set[int]:
        found = self.reader.engine.records_of(tensors_in(state_dict))
        return {record for record in found if record is not None}

    def finish(self) -> None:
        """Make all noted copies, and fill all storages that are still in use."""
        self._fill(self.reader.engine.referenced())

    def _is_unread(self, source: Tensor) -> bool:
        record = self.reader.engine.record_of(source)
        return record is not None and not self._filler.is_filled(record)

    def _fill(self, records: Iterable[int]) -> None:
        done = self._nbytes_done
        callback = self._progress

        def move_on(nbytes: int) -> None:
            self._nbytes_done = done + nbytes
            if callback is not None:
                callback(self._nbytes_done)

        progress = move_on if callback is not None else None
        self._filler.fill(records, progress)
        while self._replacements:
            self._replacements.popleft()[0].make()


def note_overwritten(error: BaseException, names: list[str], path: str) -> None:
    """Add the `names` of overwritten entries to `error`: in a note, and as an attribute."""
    error.overwritten = names  # type: ignore[attr-defined]
    named = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    message = (
        f"{path}: the restore has stopped halfway: {len(names)} entries hold values from the file, "
        f"at least in part ({named}). All other entries hold their old values"
    )
    add_note(error, message)
