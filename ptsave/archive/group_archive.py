"""An archive that one rank of a process group reads for all ranks.

The reading rank sends the directory and all records except storages.  Each rank opens them with the
engine as a sparse file in memory, and unpickles without the storages' bytes.  Then the ranks ask
for the storages that they want: see `GroupRecords`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.checks import torchscript_error
from ptsave.archive.damage import RecordDamage, damage_of
from ptsave.archive.filling import verifies_storages
from ptsave.archive.group_records import ENDED, PLANNED, GroupRecord, GroupRecords
from ptsave.archive.loading import LoadOptions, rebuild
from ptsave.archive.opening import open_source_archive
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import spans_of
from ptsave.archive.unpickling import unpickle_received
from ptsave.archive.weights_only import resolve_weights_only
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.ranges import SparseFile, open_source
from ptsave.support import config
from ptsave.support.calls import progress_bar
from ptsave.support.group_call import GroupCall, agree_on_file
from ptsave.support.torch_names import log_api_usage, restricted_unpickler


class ReceivedReader(RecordReader):
    """A `RecordReader` of an archive without its storages; `outline` has the other bytes."""

    def __init__(self, outline: Outline, path: str, *, verify: bool) -> None:
        self._file = SparseFile(outline.nbytes)
        for offset, piece in outline.pieces:
            self._file.write(offset, piece)
        engine = _C.Reader.open_descriptor(
            self._file.descriptor, 0, os.fsencode(path), direct=False
        )
        super().__init__(engine, path, config.current(), verify=verify)

    def get_record_offset(self, name: str) -> int:
        return self.engine.record(self._find(name)).payload_offset

    def close(self) -> None:
        super().close()
        self._file.close()


class Outline(NamedTuple):
    """The bytes of an archive outside its storages: pieces by offset, and the file's size."""

    nbytes: int
    pieces: list[tuple[int, bytes]]

    @classmethod
    def of(cls, reader: RecordReader) -> Outline:
        """Return the outline of an open archive."""
        engine = reader.engine
        others = {engine.find(name) for name in engine.other_names()}
        ranges = []
        end = 0
        for i, record in enumerate(engine.records()):
            end = max(end, record.limit)
            if i in others:
                reader.get_record(record.name)  # fetched if necessary, and verified
                ranges.append((record.header_offset, record.limit))
        ranges.append((end, engine.nbytes))
        return cls(engine.nbytes, [(a, reader.read_at(a, b - a)) for a, b in ranges])

    def digest(self) -> bytes:
        """Return a hash to compare the outlines of two files."""
        found = hashlib.sha256(str(self.nbytes).encode())
        for offset, piece in self.pieces:
            found.update(str(offset).encode())
            found.update(piece)
        return found.digest()


class GroupArchive(GroupRecords):
    """The records of an archive that the ranks of a group are receiving, seen from one rank.

    `source` is the file's reader on the rank that reads, and None on the others.
    """

    def __init__(
        self, call: GroupCall, reader: ReceivedReader, source: RecordReader | None
    ) -> None:
        self.reader = reader
        read = None if source is None else partial(spans_of(source).read, verify=False)
        n_records = len(reader.engine.records())
        super().__init__(call, n_records, self._record_of, read, self._error_of)

    def storages(self) -> list[int]:
        """Return the numbers of the records that are storages."""
        engine = self.reader.engine
        others = {engine.find(name) for name in engine.other_names()}
        return [i for i in range(len(engine.records())) if i not in others]

    def _record_of(self, number: int) -> GroupRecord:
        record = self.reader.engine.record(number)
        return GroupRecord(record.nbytes, record.header_offset, record.crc)

    def _error_of(self, number: int, crc: int) -> Exception:
        record = self.reader.engine.record(number)
        damage = RecordDamage(record.name, record.payload_offset, record.crc, crc)
        return damage_of(self.reader, [damage])


# ------------------------------------------------------------------------------------ opening


@contextmanager
def group_archive(
    f: Any, group: Any, *, verify: bool, storage_options: Any = None
) -> Iterator[GroupArchive]:
    """Open an archive that one rank of a group, or one rank of each host, reads.

    Collective: an exception in the block is raised on all ranks, which leave it together.  `f` is
    the path or URL of the file, the same on all ranks.  Raises UnsupportedSourceError for a file
    that is no archive, or that only torch's loader reads.
    """
    call = GroupCall(group)
    source: RecordReader | None = None
    with call.failing_together():
        agree_on_file(call, f)
    try:
        outline: Outline | None = None
        with call.failing_together():
            if call.is_reader:
                source = _opened(f, verify, storage_options)
                outline = Outline.of(source)
            call.agree_on_contents(outline.digest if outline is not None else bytes)
        reader = ReceivedReader(call.send(outline), call.name, verify=verify)
        try:
            archive = GroupArchive(call, reader, source)
            with call.failing_together():
                yield archive
                archive.wait(ENDED)
        finally:
            reader.close()
    finally:
        if source is not None:
            source.close()


_OTHERS = (
    "load_model(process_group=) takes safetensors files, and directories of shards as well, and "
    "without process_group every rank can load them by itself"
)


def _opened(f: Any, verify: bool, storage_options: Any) -> RecordReader:
    try:
        source = open_source(f, storage_options)
    except IsADirectoryError as error:
        words = f"{error.strerror}: process_group is for one file of torch.save here: {_OTHERS}"
        raise IsADirectoryError(errno.EISDIR, words, error.filename) from None
    with source.closed_on_error():
        if source.kind != "zip":
            raise UnsupportedSourceError(
                f"{source.name}: process_group is for one archive of torch.save here, of torch 1.6 "
                f"or later: {_OTHERS}"
            )
        reader = open_source_archive(source, verify=verify)
        if reader.engine.find("constants.pkl") is not None:
            raise torchscript_error(reader.path)
        if not reader.engine.all_stored:
            raise UnsupportedSourceError(
                f"{source.name}: process_group is for archives as torch.save writes them, and this "
                "one is compressed: load it without process_group"
            )
    return reader


# ----------------------------------------------------------------------------------- loading


def load_by_group(
    f: Any, options: LoadOptions, storage_options: Mapping[str, Any] | None, group: Any
) -> Any:
    """Load an archive on all ranks of a group, as :func:`ptsave.load` does."""
    with group_archive(f, group, verify=options.verify, storage_options=storage_options) as archive:
        return load_received(archive, options)


def load_received(archive: GroupArchive, options: LoadOptions, *, waits: bool = True) -> Any:
    """Load an archive that the ranks of a group receive.

    Other ranks may restore from it meanwhile, or load it to other devices.  With `waits` the bytes
    are sent when all ranks have made their plans, and the file is read once.  A rank that has to
    check its bytes first does not wait.
    """
    reader = archive.reader
    if options.mmap:
        raise UnsupportedSourceError(
            f"{reader.path}: mmap=True maps the file, and process_group is for ranks that receive "
            "it: leave one of them out"
        )
    restricted = resolve_weights_only(options.weights_only, options.pickle_module)
    module = restricted_unpickler if restricted else options.pickle_module or pickle
    reader.allows_values = options.wants_state
    log_api_usage("torch.load")
    with progress_bar(options.progress, "loading", reader.engine.nbytes) as archive.progress:
        unpickle = partial(unpickle_received, receive=partial(_receive, archive, waits))
        return rebuild(reader, options, module, unpickle)


def _receive(
    archive: GroupArchive,
    waits: bool,
    own: set[int],
    placed: Mapping[int, torch.UntypedStorage],
) -> None:
    """Receive and verify all storages, and keep the storages that the object has."""
    engine = archive.reader.engine

    def take(record: int, begin: int, part: Tensor) -> None:
        if record in placed:
            storage = placed[record]
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        elif record in own:
            target = engine.storage(record)
        else:
            return
        target[begin : begin + len(part)].copy_(part)

    if waits:
        archive.wait(PLANNED)
    archive.receive(archive.storages(), take, verify=verifies_storages(archive.reader))
