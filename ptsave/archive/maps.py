"""Checks mapped files: in the background, when a tensor is handed out, or before a load returns.

A check of a whole file reads it by its descriptor, which is as fast as touching the map.  If the
file is cut short meanwhile, the check raises an error; touching the map would end the process
(SIGBUS).  A tensor that is handed out is compared in the map, because its user touches it next.
All maps of a file share one check.  Its thread ends when the verdict is known, when all maps are
gone, or when the interpreter exits.
"""

from __future__ import annotations

import os
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import Future
from copy import copy
from functools import cached_property, partial
from threading import RLock, current_thread, main_thread
from time import monotonic
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ptsave.archive.damage import addresses_in, damage_of
from ptsave.archive.filling import resources, verifies_storages
from ptsave.archive.loading import LoadOptions
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import crc_of
from ptsave.errors import CheckpointWarning, CorruptCheckpointError
from ptsave.sources.locations import describe
from ptsave.support import config, verdicts
from ptsave.support.calls import ProgressCallback
from ptsave.support.threads import Thread, ThreadPool


class _UnneededError(Exception):
    """The thread of a check ends without a verdict."""


class Checked(Protocol):
    """A mapped file with numbered entries (records or tensors), some of which have checksums."""

    @property
    def descriptor(self) -> int: ...
    @property
    def label(self) -> str: ...  # for the file's verdict, beside its identity
    @property
    def verifies(self) -> bool: ...  # whether checksums are compared at all
    def checked(self) -> set[int]: ...  # the entries that have checksums
    def place(self, entry: int) -> tuple[int, int, int]: ...  # offset, size in bytes, CRC-32
    def compare(self, entries: list[int], progress: ProgressCallback) -> None: ...


class ArchiveRecords:
    """The records of a mapped archive, and which record contains a byte."""

    def __init__(self, reader: RecordReader) -> None:
        # The loader closes its reader, but a check needs the engine and the open file.
        self._reader = RecordReader(reader.engine, reader.path, reader.limits, verify=True)
        self.verifies = reader.limits.verify
        self.label = reader.serialization_id()

    @property
    def descriptor(self) -> int:
        return self._reader.engine.descriptor

    def checked(self) -> set[int]:
        reader = self._reader
        if not verifies_storages(reader):
            return set()
        others = set(reader.engine.other_names())
        records = reader.engine.records()
        return {i for i, record in enumerate(records) if record.name not in others}

    def place(self, entry: int) -> tuple[int, int, int]:
        record = self._reader.engine.record(entry)
        return self._reader.engine.payload_offset(entry), record.nbytes, record.crc

    def compare(self, entries: list[int], progress: ProgressCallback) -> None:
        """Compare records with their checksums; raise CorruptCheckpointError for damage."""
        damaged = self._reader.engine.read_records(
            entries, [], verify=True, progress=progress, **resources(self._reader.limits)
        )
        if damaged:
            raise damage_of(self._reader, damaged)

    @cached_property
    def _headers(self) -> list[tuple[int, int]]:
        records = self._reader.engine.records()
        return sorted((record.header_offset, i) for i, record in enumerate(records))

    def at(self, offset: int) -> int:
        """Return the number of the record that contains the byte at an offset of the file."""
        return self._headers[bisect_right(self._headers, (offset, len(self._headers))) - 1][1]

    def name_at(self, offset: int) -> str:
        """Return the name of the record that contains the byte at an offset of the file."""
        return self._reader.engine.record(self.at(offset)).name


class MapCheck:
    """Compares the entries of a mapped file with their checksums; maps of a file share it."""

    def __init__(self, file: Checked) -> None:
        self._file = file
        self._folder = config.verdicts_folder()
        self._identity = verdicts.Identity(file.descriptor, file.label)
        self._unchecked = file.checked()
        self._future: Future[Exception | None] | None = None
        self.n_waiting = 0

    def compare(self, entries: Iterable[int], mapped: Tensor) -> None:
        """Compare entries with their checksums in the map, unless that has been done before."""
        if self._unchecked and not self._unchecked.isdisjoint(entries):
            wanted = sorted(self._unchecked.intersection(entries))
            if changed := [i for i in wanted if not self._is_whole(i, mapped)]:
                self._file.compare(changed, self._go_on)  # else only the map was written to
            self._unchecked.difference_update(wanted)

    def _is_whole(self, entry: int, mapped: Tensor) -> bool:
        begin, nbytes, crc = self._file.place(entry)
        return crc_of(mapped[begin : begin + nbytes]) == crc

    def start(self) -> Future[Exception | None]:
        """Start a thread that finds the verdict, unless there is one; return the verdict's future.

        The result of the future is the error to raise, or None for a whole file.
        """
        with _lane.lock:
            if self._future is None:
                self._future = _lane.pool.submit(self._judge)
                self._future.add_done_callback(partial(_warn, weakref.ref(self)))
            return self._future

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the verdict; raise an error if the file is damaged or cannot be read."""
        with _lane.lock:
            self.n_waiting += 1
        try:
            error = self.start().result(timeout)
        except _UnneededError:  # the interpreter exits
            error = self._judge()
        finally:
            with _lane.lock:
                self.n_waiting -= 1
        if error is not None:
            raise copy(error)  # its traceback would keep the caller's tensors alive

    def _judge(self) -> Exception | None:
        try:
            self._go_on()
            if not self._unchecked:
                return None
            with verdicts.hold(self._folder, self._identity, self._go_on) as verdict:
                if not verdict.is_whole:
                    self._file.compare(sorted(self._unchecked), self._go_on)
                    verdict.remember()
                self._unchecked.clear()
        except (CorruptCheckpointError, OSError) as error:
            return error.with_traceback(None)
        return None

    def recall(self) -> None:
        """Compare nothing if the file is remembered as whole."""
        if self._unchecked and verdicts.is_remembered(self._folder, self._identity):
            self._unchecked.clear()

    def _go_on(self, _: int = 0) -> None:
        """End a check that runs on a thread of its own, if nothing needs the verdict any more."""
        if not isinstance(current_thread(), Thread):
            return
        with _lane.lock:
            is_mapped = any(mapped.check is self for mapped in list(_maps.values()))
            if not is_mapped or not main_thread().is_alive():
                self._future = None
                raise _UnneededError

    def forget_thread(self) -> None:
        """Forget the parent's thread in a forked child."""
        self.n_waiting = 0
        if self._future is not None and not self._future.done():
            self._future = None


def _warn(waiting: weakref.ref[MapCheck], future: Future[Exception | None]) -> None:
    """Warn of damage that no call waits for; the weak reference lets a check go with its maps."""
    check = waiting()
    error = future.result() if future.exception() is None else None
    if error is not None and check is not None and not check.n_waiting:
        warnings.warn(f"a mapped file is in use: {error}", CheckpointWarning, stacklevel=2)


class _Map(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    check: MapCheck


class _Lane:
    """The thread of all checks, and the lock of `_maps`, `_checks` and the futures of checks."""

    def __init__(self) -> None:
        self.pool = ThreadPool(1, "ptsave-map-check")
        self.lock = RLock()


_lane = _Lane()
_maps: dict[int, _Map] = {}  # by the address of the first byte
_checks: weakref.WeakValueDictionary[tuple[str, bool], MapCheck] = weakref.WeakValueDictionary()


def mapping(f: Any, options: LoadOptions, *, waits: bool) -> LoadOptions:
    """Return the options for a load of a map that is checked; raise ValueError if they forbid one.

    With `waits`, the load waits for the verdict.
    """
    name = describe(f)
    if not options.maps or not isinstance(f, (str, os.PathLike)):
        raise ValueError(f"{name}: only the path of a file, loaded with mmap=True, can be mapped")
    if str(options.map_location) not in ("None", "cpu"):
        raise ValueError(f"{name}: a mapped file that is verified stays in CPU memory")

    def stay(storage: Any, location: str) -> Any:
        if location != "cpu" and options.map_location is None:
            raise ValueError(f"{name} has tensors of {location!r}: pass map_location='cpu'")
        return storage

    def check(file: Checked | RecordReader, storage: torch.UntypedStorage) -> MapCheck:
        found = watch(file, storage)
        if waits:
            found.wait()
        else:
            found.start()
        return found

    return options._replace(map_location=stay, on_map=check)


def watch(file: Checked | RecordReader, storage: torch.UntypedStorage) -> MapCheck:
    """Return the check of a mapped file; the check lives as long as a map of the file."""
    file = ArchiveRecords(file) if isinstance(file, RecordReader) else file
    key = verdicts.Identity(file.descriptor, file.label).key(), file.verifies
    begin = storage.data_ptr()

    def forget(gone: weakref.ref[torch.UntypedStorage]) -> None:
        if begin in _maps and _maps[begin].storage is gone:
            del _maps[begin]

    with _lane.lock:
        check = _checks.get(key)
        if check is None:
            check = _checks[key] = MapCheck(file)
        _maps[begin] = _Map(weakref.ref(storage, forget), storage.nbytes(), check)
    return check


def _checks_of(addresses: Iterable[int]) -> list[MapCheck]:
    """Return the check of each mapped file that contains one of the addresses."""
    maps = _maps.copy()
    begins = sorted(maps)
    found: dict[MapCheck, None] = {}
    for address in addresses:
        at = bisect_right(begins, address) - 1
        if at >= 0 and address < begins[at] + maps[begins[at]].nbytes:
            found[maps[begins[at]].check] = None
    return list(found)


def checks_for(obj: Any) -> list[MapCheck]:
    """Return the check of each mapped file whose tensors are in `obj`; raise if there is none."""
    if isinstance(obj, torch.nn.Module):
        obj = [*obj.parameters(), *obj.buffers()]
    addresses = addresses_in(obj)
    return require_checks(_checks_of(addresses), obj) if addresses else []


def require_checks(checks: list[MapCheck], obj: Any) -> list[MapCheck]:
    """Return the checks; raise ValueError if there are none."""
    if checks:
        return checks
    raise ValueError(
        f"the {type(obj).__name__} has no tensor in a mapped file that is checked: load it with "
        "mmap=True and verify='background', with ptsave.share, or with ptsave.open and map=True"
    )


def wait_for(checks: list[MapCheck], timeout: float | None) -> None:
    """Wait for the verdict about each file."""
    deadline = None if timeout is None else monotonic() + timeout
    for check in checks:
        check.wait(None if deadline is None else max(0.0, deadline - monotonic()))


def _begin_child() -> None:
    _lane.__init__()  # type: ignore[misc]  # the thread and its lock are the parent's
    for check in list(_checks.values()):
        check.forget_thread()


os.register_at_fork(after_in_child=_begin_child)
