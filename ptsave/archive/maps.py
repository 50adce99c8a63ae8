"""Checks mapped files: in the background, when a tensor is handed out, or before a load returns.

A check reads the file by its descriptor, which is as fast as touching the map.  If the file is cut
short meanwhile, the check raises an error; touching the map would end the process (SIGBUS).
All maps of a file share one check.  Its thread ends when the verdict is known, when all maps are
gone, or when the interpreter exits.
"""

from __future__ import annotations

import os
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from copy import copy
from functools import partial
from threading import RLock, current_thread, main_thread
from time import monotonic
from typing import Any, NamedTuple

import torch

from ptsave.archive.damage import addresses_in, damage_of
from ptsave.archive.filling import resources, verifies_storages
from ptsave.archive.loading import LoadOptions
from ptsave.archive.reader import RecordReader
from ptsave.errors import CheckpointWarning, CorruptCheckpointError
from ptsave.sources.locations import describe
from ptsave.support import config, verdicts
from ptsave.support.threads import Thread, ThreadPool


class _UnneededError(Exception):
    """The thread of a check ends without a verdict."""


class MapCheck:
    """Compares the storages of a mapped archive with their checksums; maps of a file share it."""

    def __init__(self, reader: RecordReader) -> None:
        # The loader closes its reader, but the check needs the engine and the open file.
        self.reader = RecordReader(reader.engine, reader.path, reader.limits, verify=True)
        self._folder = config.verdicts_folder()
        self._identity = verdicts.Identity(reader.engine.descriptor, reader.serialization_id())
        has_crcs = self.reader.verify and verifies_storages(self.reader)
        others = set(reader.engine.other_names()) if has_crcs else set()
        records = reader.engine.records()
        self._headers = sorted((record.header_offset, i) for i, record in enumerate(records))
        self._unchecked = {
            i for i, record in enumerate(records) if has_crcs and record.name not in others
        }
        self._future: Future[Exception | None] | None = None
        self.n_waiting = 0

    def record_at(self, offset: int) -> int:
        """Return the number of the record that contains the byte at an offset of the file."""
        return self._headers[bisect_right(self._headers, (offset, len(self._headers))) - 1][1]

    def record_name(self, offset: int) -> str:
        """Return the name of the record that contains the byte at an offset of the file."""
        return self.reader.engine.record(self.record_at(offset)).name

    def compare(self, records: Iterable[int]) -> None:
        """Compare records with their checksums, unless that has been done before."""
        if self._unchecked and not self._unchecked.isdisjoint(records):
            wanted = sorted(self._unchecked.intersection(records))
            limits = resources(self.reader.limits)
            damaged = self.reader.engine.read_records(
                wanted, [], verify=True, progress=self._go_on, **limits
            )
            if damaged:
                raise damage_of(self.reader, damaged)
            self._unchecked.difference_update(wanted)

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
                    self.compare(self._unchecked.copy())
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


def mapping(
    f: Any, options: LoadOptions, on_map: Callable[[RecordReader, torch.UntypedStorage], object]
) -> LoadOptions:
    """Return the options for a load with `on_map`; raise ValueError if they do not allow a map."""
    name = describe(f)
    if not options.maps or not isinstance(f, (str, os.PathLike)):
        raise ValueError(f"{name}: only the path of a file, loaded with mmap=True, can be mapped")
    if str(options.map_location) not in ("None", "cpu"):
        raise ValueError(f"{name}: a mapped file that is verified stays in CPU memory")

    def stay(storage: Any, location: str) -> Any:
        if location != "cpu" and options.map_location is None:
            raise ValueError(f"{name} has tensors of {location!r}: pass map_location='cpu'")
        return storage

    return options._replace(map_location=stay, on_map=on_map)


def watch(reader: RecordReader, storage: torch.UntypedStorage) -> MapCheck:
    """Return the check of a mapped archive; the check lives as long as a map of the file."""
    label = reader.serialization_id()
    key = verdicts.Identity(reader.engine.descriptor, label).key(), reader.limits.verify
    begin = storage.data_ptr()

    def forget(gone: weakref.ref[torch.UntypedStorage]) -> None:
        if begin in _maps and _maps[begin].storage is gone:
            del _maps[begin]

    with _lane.lock:
        check = _checks.get(key)
        if check is None:
            check = _checks[key] = MapCheck(reader)
        _maps[begin] = _Map(weakref.ref(storage, forget), storage.nbytes(), check)
    return check


def check_in_background(reader: RecordReader, storage: torch.UntypedStorage) -> None:
    """Start the check of a mapped archive."""
    watch(reader, storage).start()


def check_now(reader: RecordReader, storage: torch.UntypedStorage) -> None:
    """Check a mapped archive; raise an error if it is damaged."""
    watch(reader, storage).wait()


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


def wait_for(obj: Any, timeout: float | None, name: str) -> None:
    """Wait for the verdict about each mapped file whose tensors are in `obj`, named `name`."""
    if isinstance(obj, torch.nn.Module):
        obj = [*obj.parameters(), *obj.buffers()]
    addresses = addresses_in(obj)
    checks = _checks_of(addresses)
    if addresses and not checks:
        raise ValueError(
            f"{name} has no tensor in a mapped file that is checked: load it with mmap=True and "
            "verify='background', with ptsave.share, or with ptsave.open and map=True"
        )
    deadline = None if timeout is None else monotonic() + timeout
    for check in checks:
        check.wait(None if deadline is None else max(0.0, deadline - monotonic()))


def _begin_child() -> None:
    _lane.__init__()  # type: ignore[misc]  # the thread and its lock are the parent's
    for check in list(_checks.values()):
        check.forget_thread()


os.register_at_fork(after_in_child=_begin_child)
