"""An archive that one rank of a process group reads: all ranks receive its bytes.

The reading rank sends the directory and all records but the storages; each rank puts them into a
sparse file in memory, which the engine opens, and unpickles by itself, without bytes.  Then the
ranks say which storages they want: `GroupRecords`.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ptsave import _C
from ptsave.archive.checks import torchscript_error
from ptsave.archive.damage import RecordDamage, damage_of
from ptsave.archive.format_errors import raise_corrupt
from ptsave.archive.group_records import ENDED, GroupRecord, GroupRecords, Take
from ptsave.archive.opening import open_source_archive
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import spans_of
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.opening import open_source
from ptsave.sources.ranges import SparseFile
from ptsave.support import config
from ptsave.support.group_call import GroupCall, agree_on_file

__all__ = ["GroupArchive", "group_archive"]


class ReceivedReader(RecordReader):
    """A `RecordReader` of an archive whose storages are not there.

    Parameters
    ----------
    outline : Outline
        The rest of it.
    path : str
        Its name in messages.
    verify : bool
        Whether checksums are compared.
    """

    def __init__(self, outline: Outline, path: str, *, verify: bool) -> None:
        self._file = SparseFile(outline.nbytes)
        for offset, piece in outline.pieces:
            self._file.write(offset, piece)
        try:
            engine = _C.Reader.open_descriptor(
                self._file.descriptor, 0, os.fsencode(path), direct=False
            )
        except _C.FormatError as error:
            raise_corrupt(error, path)
        super().__init__(engine, path, config.current(), verify=verify)

    def get_record_offset(self, name: str) -> int:
        return self.engine.record(self._find(name)).payload_offset

    def close(self) -> None:
        super().close()
        self._file.close()


class Outline(NamedTuple):
    """The bytes of an archive that are no storage's.

    Attributes
    ----------
    nbytes : int
        The size of the file.
    pieces : list of (int, bytes)
        Parts of it, by their offsets.
    """

    nbytes: int
    pieces: list[tuple[int, bytes]]

    @classmethod
    def of(cls, reader: RecordReader) -> Outline:
        """Return that of an open archive."""
        engine = reader.engine
        others = {engine.find(name) for name in engine.other_names()}
        ranges = []
        end = 0
        for i, record in enumerate(engine.records()):
            end = max(end, record.limit)
            if i in others:
                reader.get_record(record.name)  # fetched, if it has to be, and verified
                ranges.append((record.header_offset, record.limit))
        ranges.append((end, engine.nbytes))
        return cls(engine.nbytes, [(a, reader.read_at(a, b - a)) for a, b in ranges])

    def digest(self) -> bytes:
        """Return a hash, by which the outlines of two files are compared."""
        found = hashlib.sha256(str(self.nbytes).encode())
        for offset, piece in self.pieces:
            found.update(str(offset).encode())
            found.update(piece)
        return found.digest()


class GroupArchive:
    """An archive that is being received by the ranks of a group, seen from one of them.

    Parameters
    ----------
    call : GroupCall
        The call of all ranks.
    reader : ReceivedReader
        The archive.
    source : RecordReader or None
        The file, on the rank that reads it.
    """

    def __init__(
        self, call: GroupCall, reader: ReceivedReader, source: RecordReader | None
    ) -> None:
        self.reader = reader
        read = None
        if source is not None:
            read = partial(spans_of(source).read, verify=False)
        n_records = len(reader.engine.records())
        self._records = GroupRecords(call, n_records, self._record, read, self._damaged)

    def storages(self) -> list[int]:
        """Return the records that are storages."""
        engine = self.reader.engine
        others = {engine.find(name) for name in engine.other_names()}
        return [i for i in range(len(engine.records())) if i not in others]

    def receive(self, records: Collection[int], take: Take, *, verify: bool) -> None:
        """Receive records now, as `GroupRecords.receive`; errors as of `wait`."""
        self._records.receive(records, take, verify=verify, progress=self.reader.progress)

    def wait(self, barrier: int) -> None:
        """Wait until all ranks have come to a barrier; bytes for others pass by meanwhile.

        Raises
        ------
        Exception
            A rank has failed, or reading the file has.
        """
        self._records.wait(barrier, self.reader.progress)

    def _record(self, number: int) -> GroupRecord:
        record = self.reader.engine.record(number)
        return GroupRecord(record.nbytes, record.header_offset, record.crc)

    def _damaged(self, number: int, crc: int) -> Exception:
        record = self.reader.engine.record(number)
        damage = RecordDamage(record.name, record.payload_offset, record.crc, crc)
        return damage_of(self.reader, [damage])


# ------------------------------------------------------------------------------------ opening


@contextmanager
def group_archive(
    f: Any, group: Any, *, verify: bool, storage_options: Any = None
) -> Iterator[GroupArchive]:
    """Open an archive that one rank of a group, or one of each host, reads.

    Collective: an exception in the block is raised on all ranks, which leave it together.

    Parameters
    ----------
    f : str or os.PathLike
        The path or URL of the file, the same on all ranks.
    group : torch.distributed.ProcessGroup
        The ranks.
    verify : bool
        Whether checksums are compared.
    storage_options : mapping, optional
        Arguments of the file system of a URL.

    Raises
    ------
    Exception
        The file cannot be opened, or the ranks ask for different ones.
    UnsupportedSourceError
        It is no archive, or of a kind that only torch reads.
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
