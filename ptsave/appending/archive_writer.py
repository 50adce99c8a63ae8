"""`ArchiveWriter` adds entries to an archive while the program goes on.

Each call pickles a group of entries and copies the group's storages.  A thread writes the groups in
batches.  Each batch ends with a journal: the record `.journal/<i>`, which has the batch's pickles.
So the file of a killed process can be read.  `close` joins all pickles in the record `data.pkl`.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor
from torch.serialization import get_crc32_options

from ptsave import _C
from ptsave.appending.batches import Batch, BatchQueue, pickle_group
from ptsave.archive.recovery import JOURNAL_PREFIX, dict_of_parts
from ptsave.background import saves
from ptsave.errors import SaveError, StagingFullError, UnsupportedUrlError
from ptsave.support import config
from ptsave.support.calls import check_flags, parse_size
from ptsave.support.torch_names import storage_alignment
from ptsave.writing.targets import (
    direct_nbytes,
    name_of,
    refuse_safetensors_name,
    replaceable_file,
    resolve_target,
    root_for_path,
)

WhenFull: TypeAlias = Literal["wait", "drop", "raise"]
_WHEN_FULL = get_args(WhenFull)

_SLACK_NBYTES = 64 << 10  # extra bytes of a staged chunk: see _STAGING_SLACK in writing/targets.py
# The writer reserves memory in parts of this size, or of a quarter of the budget if that is less.
# A part is large because a reservation checks the free memory, which takes longer than a copy.
_ROOM_NBYTES = 128 << 20
_BUFFERS_PART = 8  # the buffers for writing take another 1/8 of the budget
_MIN_CHUNK_NBYTES = 256 << 10
_FORKED = (
    "this process was forked while the archive was being written: only the parent process can add "
    "to it"
)

# Errors after which the first entries of a batch may still fit on the disk.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_log = logging.getLogger(__name__)
_open_writers: set[ArchiveWriter] = set()


class ArchiveWriter:
    """Writes an archive entry by entry; any thread may add entries.

    The file looks like a saved dict: :func:`torch.load` returns a dict of the entries, in the
    order in which they were added.  :meth:`add` copies the values, and a thread writes the copies
    while the program goes on.  Until :meth:`close`, the entries are in a temporary file beside
    `path`.

    Parameters
    ----------
    path : str or os.PathLike
        The file, which :meth:`close` creates or replaces.
    fsync : bool, default False
        Whether :meth:`flush` and :meth:`close` wait until all entries would survive a power loss.
    max_memory_bytes : int or str, optional
        The most bytes of values that may wait to be written, for example ``"8GB"``.  Copies
        of unfinished saves count, too.  The default is the same as in :func:`ptsave.async_save`.
    when_full : {"wait", "drop", "raise"}
        What to do if there is no room for an entry: "wait" until other entries are written, "drop"
        the new entry, or "raise" StagingFullError.

    Raises
    ------
    SaveError
        If the file cannot be created, for example because its directory does not exist.
    UnsupportedUrlError
        If `path` is a URL.
    ValueError
        If the name ends with ``.safetensors``.

    Notes
    -----
    If entries of the same call or of different calls share a storage, the storage is written once.
    It is written again if `Tensor._version` shows a change.  torch does not count changes through
    ``tensor.data`` or a NumPy array: after such a change, call :meth:`forget_storages`, so that
    later entries write their storages again.

    A killed process leaves the file ``.<name>.<16 hex digits>.ptsave`` in the directory.
    ``ptsave.open(this_file, recover=True)`` reads the entries that were written.  Entries that were
    still in memory are lost, such as the entries of the last 50 ms.  When the next writer or save
    has completed a new file at the same path, it removes the old temporary file.

    When the interpreter exits, it closes open writers.  After a fork, only the parent process can
    use the writer; in the child each method raises RuntimeError.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "run.pt")
    ...     with ptsave.ArchiveWriter(path) as writer:
    ...         for step in range(2):
    ...             _ = writer.add(f"loss/{step}", torch.tensor(1.0 - step))
    ...     torch.load(path)
    {'loss/0': tensor(1.), 'loss/1': tensor(0.)}
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fsync: bool = False,
        max_memory_bytes: int | str | None = None,
        when_full: WhenFull = "wait",
    ) -> None:
        _check_when_full(when_full)
        check_flags(fsync=fsync)
        self._path = _checked_path(path)
        self._fsync = fsync
        self._when_full = when_full
        self._limits = config.current()
        if isinstance(max_memory_bytes, str):
            max_memory_bytes = parse_size(max_memory_bytes, "max_memory_bytes")
        self._max_nbytes = saves.limit_of(max_memory_bytes, "max_memory_bytes")
        self._process = os.getpid()
        self._adding = threading.Lock()
        self._closed = False
        self._failure: BaseException | None = None
        self._names: set[str] = set()
        self._storages = _C.NumberedStorages()
        self._journals: list[tuple[int, int]] = []  # where each journal's pickles are in the file
        target = replaceable_file(self._path)
        try:
            self._archive = _C.AppendedArchive(
                os.fsencode(target),
                os.fsencode(self._path),
                root=root_for_path(self._path),
                alignment=storage_alignment(),
            )
        except OSError as error:
            raise SaveError.from_os_error(error, self._path) from None
        self._target = target
        self._queue = BatchQueue(self._write, self._max_nbytes)
        _open_writers.add(self)

    # -------------------------------------------------------------------------------- adding

    def add(
        self, name: str, value: object, *, copy: bool = True, when_full: WhenFull | None = None
    ) -> bool:
        """Add an entry.

        Parameters
        ----------
        name : str
            The entry's key in the dict.
        value : object
            A tensor, or any object that :func:`torch.save` takes.
        copy : bool, default True
            Whether to copy the values.  With False, the writer keeps the tensors themselves, and
            you must not change their values until they are written.
        when_full : {"wait", "drop", "raise"} or None
            What to do if there is no room for this entry; None means the writer's `when_full`.

        Returns
        -------
        bool
            Whether the entry was added; False only with ``when_full="drop"``.

        Raises
        ------
        ValueError
            If there is already an entry with that name, or the writer is closed.
        StagingFullError
            If there is no room and `when_full` is "raise", or if the entry is too large to ever
            have room and `when_full` is "wait".
        SaveError
            If the file could not be written.  Each later call raises the same error.
        Exception
            Any error from pickling the value.  Then nothing was added.
        """
        return self._add({name: value}, copy, when_full)

    def add_group(
        self, entries: Mapping[str, object], *, copy: bool = True, when_full: WhenFull | None = None
    ) -> bool:
        """Add several entries; if there is not enough room for all of them, add none.

        Parameters
        ----------
        entries : mapping of str to object
            Values by name.  Objects that several values share stay shared.
        copy, when_full
            As for :meth:`add`.  The result and the errors are also the same.
        """
        if not isinstance(entries, Mapping):
            raise TypeError(
                "entries must be a mapping of names to values, such as a dict, not "
                f"{type(entries).__name__}"
            )
        return self._add(dict(entries), copy, when_full)

    def _add(
        self,
        entries: dict[str, object],
        copy: bool,
        when_full: WhenFull | None,
        *,
        measured: Tensor | None = None,
        found: list[tuple[Any, ...] | None] | None = None,
        max_room_nbytes: int | None = None,
    ) -> bool:
        self._refuse_forked()
        when_full = when_full or self._when_full
        _check_when_full(when_full)
        with self._adding:
            self._check_usable()
            self._check_names(entries)
            try:
                pickle = pickle_group(entries, self._storages)
                nbytes = self._storages.fresh_nbytes + len(pickle)
                room_nbytes = nbytes if max_room_nbytes is None else min(nbytes, max_room_nbytes)
                batch = self._batch_for(room_nbytes, when_full)
                if batch is None:
                    self._storages.rollback()
                    return False
                try:
                    statistics = batch.engine.add(
                        self._storages,
                        pickle,
                        copy=copy,
                        n_threads=self._limits.n_threads,
                        measured=measured,
                    )
                    if found is not None:
                        found.append(statistics)
                    batch.use(nbytes, room_nbytes, len(entries))
                    self._storages.commit()
                    self._names.update(entries)
                finally:
                    self._queue.end()
            except BaseException:
                self._storages.rollback()
                raise
        return True

    def _check_names(self, entries: dict[str, object]) -> None:
        for name in entries:
            if not isinstance(name, str):
                raise TypeError(f"the name of an entry must be a str, not {type(name).__name__}")
            if name in self._names:
                raise ValueError(f"{self._path}: there is an entry {name!r} already")

    def _batch_for(self, nbytes: int, when_full: WhenFull) -> Batch | None:
        """Return a batch with room for `nbytes`; None if the caller should drop the entries."""
        batch = self._queue.begin(nbytes)
        if batch is not None:
            return batch
        room_nbytes = _ROOM_NBYTES
        if self._max_nbytes is not None:
            room_nbytes = min(room_nbytes, self._max_nbytes // 4)
        wanted = max(nbytes, room_nbytes)
        for each in {wanted: None, nbytes: None}:  # one try if both are the same
            with suppress(StagingFullError):
                reservation = saves.reserve(each, self._max_nbytes, wait=False)
                return self._queue.begin_with(reservation, each)
        if when_full == "drop":
            return None
        if when_full == "wait":
            self._queue.hurry()
        reservation = saves.reserve(
            nbytes, self._max_nbytes, wait=when_full == "wait", option="max_memory_bytes"
        )
        try:
            self._check_usable()  # a failed write releases room, too
        except BaseException:
            reservation.release()
            raise
        return self._queue.begin_with(reservation, nbytes)

    # ------------------------------------------------------------------------------- writing

    def _write(self, batch: Batch) -> None:
        try:
            self._write_groups(batch, batch.engine.n_groups)
        except OSError as error:
            if error.errno in _NO_SPACE:
                self._write_beginning(batch)
            raise

    def _write_beginning(self, batch: Batch) -> None:
        """Write the first entries of a batch, as many as still fit on the disk."""
        n_groups = batch.engine.n_groups // 2
        with suppress(OSError):
            disk = os.statvfs(os.path.dirname(self._target))
            n_groups = batch.engine.n_groups_within(disk.f_bavail * disk.f_frsize)
        while n_groups:
            with suppress(OSError):
                self._write_groups(batch, n_groups)
                return
            n_groups //= 2  # statvfs does not count quotas or the limit of a file's size

    def _write_groups(self, batch: Batch, n_groups: int) -> None:
        if not n_groups:  # the batch's only entry could not be copied
            return
        nbytes = self._archive.nbytes + batch.nbytes
        direct = (
            self._limits.direct_io
            and direct_nbytes(batch.nbytes, fsync=True) > 0
            and direct_nbytes(nbytes, fsync=self._fsync, in_background=True) > 0
        )
        slack = _SLACK_NBYTES if batch.engine.is_staged else 0
        n_threads = self._limits.n_direct_writers if direct else self._limits.n_threads
        chunk_nbytes = self._limits.write_chunk_nbytes  # the budget bounds all buffers together
        if self._max_nbytes is not None:
            part = self._max_nbytes // (_BUFFERS_PART * max(n_threads, 1))
            chunk_nbytes = min(chunk_nbytes, part)
        options = _C.WriteOptions(
            compute_crcs=get_crc32_options(),
            n_threads=n_threads,
            chunk_nbytes=max(chunk_nbytes, _MIN_CHUNK_NBYTES) - slack,
            payloads_are_still=True,
            max_pinned_nbytes=self._limits.max_pinned_nbytes,
            in_background=True,
        )
        name = f"{JOURNAL_PREFIX}{len(self._journals)}"
        journal = batch.engine.write(
            self._archive, name, n_groups=n_groups, direct=direct, options=options, progress=None
        )
        self._journals.append(journal)

    def flush(self) -> None:
        """Wait until all added entries are in the temporary file; with `fsync`, sync the file, too.

        Raises
        ------
        SaveError
            If writing or syncing failed.
        """
        self._refuse_forked()
        with self._adding:
            self._check_usable()
            self._queue.drain()
            self._check_usable()
            if self._fsync:
                try:
                    self._archive.sync()
                except OSError as error:
                    raise self._fail(error) from None

    def close(self) -> None:
        """Complete the file and move it to its path; closing twice is allowed.

        Raises
        ------
        SaveError
            If any entry could not be written.  If the temporary file has entries, it stays, and the
            message names it.  If the disk was full, this file has the first entries that fit.
        """
        self._refuse_forked()
        with self._adding:
            if self._closed:
                return
            self._queue.drain()
            try:
                self._check_usable()
                pickle = dict_of_parts([self._archive.read(*place) for place in self._journals])
                self._archive.close(pickle, compute_crcs=get_crc32_options(), durable=self._fsync)
            except OSError as error:
                failure = self._failure or self._fail(error)
                self._keep()
                raise failure from None
            except BaseException:
                self._keep()
                raise
            self._end()
            _C.remove_leftovers(os.fsencode(self._target))

    def abort(self) -> None:
        """Remove the temporary file; a file at `path` stays as it was."""
        self._refuse_forked()
        with self._adding:
            if not self._closed:
                self._queue.drop()
                self._archive.discard()
                self._end()

    def _keep(self) -> None:
        """End the writer after a failure; the temporary file stays if it has entries."""
        if self._journals:
            self._archive.keep()
        else:
            self._archive.discard()
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._storages.forget()
        _open_writers.discard(self)

    def forget_storages(self) -> None:
        """Write the storages of later entries again, even if the file already has them."""
        self._refuse_forked()
        with self._adding:
            self._storages.forget()

    # ---------------------------------------------------------------------------- properties

    @property
    def nbytes(self) -> int:
        """Bytes written so far, plus the bytes of values that wait to be written."""
        return self._archive.nbytes + self._queue.waiting_nbytes

    @property
    def temporary_path(self) -> str:
        """Path of the temporary file with the entries; "" if there is no such file."""
        name = os.fsdecode(self._archive.temporary_name)
        return os.path.join(os.path.dirname(self._target), name) if name else ""

    @property
    def n_entries(self) -> int:
        """Number of entries added so far."""
        return len(self._names)

    @property
    def closed(self) -> bool:
        """Whether the writer has been closed or aborted."""
        return self._closed

    def __enter__(self) -> ArchiveWriter:
        self._refuse_forked()
        self._check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SaveError as failure:
            if failure is not error:
                raise

    def __repr__(self) -> str:
        return f"<ptsave.ArchiveWriter {self._path!r}{' (closed)' if self._closed else ''}>"

    # -------------------------------------------------------------------------------- errors

    def _check_usable(self) -> None:
        if self._closed:
            raise ValueError(f"{self._path}: the archive is closed")
        if self._failure is None and self._queue.failure is not None:
            self._failure = self._fail(self._queue.failure)
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> BaseException:
        """Return `error`; for an OSError, a SaveError that says where the written entries are."""
        if isinstance(error, OSError):
            failure = SaveError.from_os_error(error, self._path)
            leftover = self.temporary_path
            kept = "none of the entries could be kept"
            if self._journals and leftover:
                kept = (
                    f"the entries written before are in {leftover}: read this file with "
                    "ptsave.open(..., recover=True)"
                )
            error = SaveError(failure.errno or 0, f"{failure.strerror}; {kept}", self._path)
        self._failure = error
        return error

    def _refuse_forked(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"{self._path}: {_FORKED}")


class MeasuringWriter(ArchiveWriter):
    """The `ArchiveWriter` that :func:`ptsave.capture` uses, with methods that are not public."""

    def add_of_any_size(self, name: str, value: object, *, when_full: WhenFull) -> bool:
        """Add an entry as :meth:`add` does, even one that is larger than `max_memory_bytes`.

        Such an entry reserves all of `max_memory_bytes`.
        """
        return self._add({name: value}, False, when_full, max_room_nbytes=self._max_nbytes)

    def add_measured(self, name: str, tensor: Tensor) -> tuple[bool, tuple[Any, ...] | None]:
        """Add a copy of a tensor, and compute its statistics while copying.

        Returns whether it was added, and the fields of `ptsave.capturing.schema.Statistics`, or
        None if the tensor does not fill its storage or the file has the storage already.
        """
        found: list[tuple[Any, ...] | None] = []
        added = self._add({name: tensor}, True, None, measured=tensor, found=found)
        return added, found[0] if found else None


def _checked_path(path: Any) -> str:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise TypeError(f"path must be a str or an os.PathLike of str, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"path must not have a NUL character: {text!r}")
    if not os.path.basename(text) and "://" not in text:
        reason = "the path names a directory: give the name of a file in it"
        raise SaveError(errno.EISDIR, reason, text)
    refuse_safetensors_name(text)
    target = resolve_target(path)
    if not isinstance(target, str):
        reason = "ArchiveWriter writes only local files"
        raise UnsupportedUrlError.of_target(name_of(target), reason)
    return target


def _check_when_full(when_full: str) -> None:
    if when_full not in _WHEN_FULL:
        raise ValueError(f"when_full must be 'wait', 'drop' or 'raise', not {when_full!r}")


@atexit.register
def _close_all() -> None:
    for writer in list(_open_writers):
        try:
            writer.close()
        except Exception:
            _log.exception("could not close %r at exit", writer)


def _begin_child() -> None:
    for writer in _open_writers:  # the files are left to the parent process
        writer._queue.abandon()
        writer._archive.keep()
    _open_writers.clear()


os.register_at_fork(after_in_child=_begin_child)
