"""Writes a capture's file: blocks (records of calls and values), and the captured tensors.

Tensors of up to 128 KiB are cloned and added in groups, because one addition to the file takes as
long as copying 100 KiB.  A hook starts to copy an accelerator's tensor to host memory, and does not
wait.  A thread waits for each copy, computes its statistics and adds it to the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from pickle import PicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ptsave import _C
from ptsave.appending.archive_writer import MeasuringWriter, WhenFull
from ptsave.capturing.schema import VALUE_FIELDS, block_key, block_to_plain
from ptsave.capturing.tensors import keeps_storage, statistics_of, stored_nbytes, unexpanded
from ptsave.errors import SaveError, StagingFullError
from ptsave.support.threads import ThreadPool

SMALL_NBYTES = 128 << 10  # the largest tensor that is added in a group with others
_MAX_PENDING_NBYTES = 4 << 20
_MAX_PENDING = 256
_ENTRY_NBYTES = 1 << 10  # a tensor's part of the pickle is smaller, unless its name is long
MAX_VALUES = 8192  # records of values in one block

_STORED, _NOTE, _STATISTICS = map(VALUE_FIELDS.index, ("stored", "note", "statistics"))

_NO_ROOM = "dropped: no room in memory"
_NO_BYTES = "dropped: max_bytes"
# Errors that torch or pickle raises for a tensor that torch cannot save.
_UNSAVABLE = (NotImplementedError, RuntimeError, TypeError, AttributeError, PicklingError)
_MAX_REASON = 200


class Options(NamedTuple):
    """The checked options of a `capture` call."""

    what: list[str]
    include: list[str]
    exclude: list[str]
    steps: Container[int] | Callable[[int], bool] | None
    statistics: bool
    tensors: bool
    call_stacks: bool
    optimizer: Optimizer | None
    max_bytes: int | None
    max_memory_bytes: int | None
    when_full: WhenFull
    fsync: bool
    rank: int | None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that makes `device` the current device.

    Without it, a torch.Event uses the thread's current device.  In a new thread, this is device 0.
    There the event would create a context, which takes hundreds of MiB.
    """
    return torch.accelerator.device_index(device.index)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """If the ``with`` block raises StagingFullError, put the tensor's `name` before its message."""
    try:
        yield
    except StagingFullError as error:
        if name:
            error.args = (f"{name}: {error}",)
        raise


class Staged:
    """A tensor that is being copied from an accelerator; `row` is its record's index in a block."""

    def __init__(self, host: Tensor, event: Any, name: str) -> None:
        self.host: Tensor | None = host  # None after the copy was added to the file
        self.event = event
        self.name = name  # "" if only its statistics are kept
        self.row = -1
        self.found: tuple[Any, ...] | None = None


class Block:
    """Records of one step that are written to the file together."""

    def __init__(self, step: int, number: int) -> None:
        self.step = step
        self.key = block_key(step, number)
        self.calls: list[tuple[Any, ...]] = []
        self.values: list[tuple[Any, ...]] = []
        self.staged: list[Staged] = []


class Blocks:
    """Adds blocks and tensors to a file, within the limits `max_memory_bytes` and `max_bytes`."""

    def __init__(self, writer: MeasuringWriter, options: Options, max_staged_bytes: int) -> None:
        self._writer = writer
        self._options = options
        # A group of small tensors takes at most a quarter of the budget, so it finds room at once.
        part_nbytes = _MAX_PENDING_NBYTES
        if options.max_memory_bytes is not None:
            part_nbytes = options.max_memory_bytes // 4
        self._max_pending_nbytes = min(_MAX_PENDING_NBYTES, part_nbytes)
        self._small_nbytes = min(SMALL_NBYTES, part_nbytes)
        self._max_staged_bytes = max_staged_bytes
        self._lock = threading.Lock()
        self._pending: dict[str, Tensor] = {}
        self._pending_nbytes = 0
        self._dropped: dict[str, str] = {}  # why tensors were left out, by name
        self._unwritten: list[tuple[str, dict[str, Any]]] = []
        self._lane = ThreadPool(1, "ptsave-capture")
        self._room = threading.Condition()
        self._staged_nbytes = 0
        self._failure: BaseException | None = None
        self.stored_nbytes = 0
        self.n_dropped = 0

    def store(self, name: str, tensor: Tensor, nbytes: int) -> str:
        """Add a CPU tensor as it is now; return "", or the reason why it was left out."""
        with self._lock:
            if nbytes > self._small_nbytes:
                return self._store_large(name, tensor, nbytes)
            if not self._fits_file(nbytes):
                return _NO_BYTES
            self._pending[name] = tensor.detach().clone()
            self._pending_nbytes += nbytes + _ENTRY_NBYTES
            self.stored_nbytes += nbytes
            is_full = self._pending_nbytes > self._max_pending_nbytes
            if is_full or len(self._pending) > _MAX_PENDING:
                self._add_pending()
        return ""

    def store_measured(self, name: str, tensor: Tensor) -> tuple[str, tuple[Any, ...] | None]:
        """Add a large tensor that fills its storage, as it is now.

        Returns two values: "", or the reason why the tensor is left out; its statistics, or None.
        """
        nbytes = tensor.untyped_storage().nbytes()
        with self._lock:
            if not self._fits_file(nbytes):
                return _NO_BYTES, None
            with _naming(name):
                added, found = self._writer.add_measured(name, tensor.detach())
            if not added:
                return self._drop(_NO_ROOM), found
            self.stored_nbytes += nbytes
            return "", found

    def stage(self, block: Block, name: str, tensor: Tensor) -> Staged | str:
        """Start to copy a tensor from an accelerator, or return the reason why it is left out."""
        whole = unexpanded(tensor.detach())
        nbytes = whole.nbytes
        if name and not self._fits_file(nbytes):
            return _NO_BYTES
        with _naming(name):
            if not self._reserve(nbytes):
                return self._drop(_NO_ROOM)
        with _current(tensor.device):
            host = torch.empty_like(whole, device="cpu", requires_grad=False)
            locked = _C.page_locked_storage(host.nbytes, whole.device)
            if locked is not None:  # without page-locked memory, the copy waits for the device
                host.set_(locked, 0, host.shape, host.stride())
            host.copy_(whole, non_blocking=True)
            event = torch.Event(device=tensor.device)
            event.record(torch.accelerator.current_stream(tensor.device))
            staged = Staged(host.expand(tensor.shape), event, name)
            del event  # only `staged` keeps the event, which must be destroyed on its device
        if name:
            self.stored_nbytes += nbytes
        block.staged.append(staged)
        self._lane.submit(self._take_staged, staged, nbytes)
        return staged

    def finish(self, block: Block) -> None:
        """Add a complete block to the file, once its tensors are copied from accelerators."""
        self._raise_failure()
        if block.staged:
            self._lane.submit(self._finish_staged, block)
        elif block.calls or block.values:
            self._finish_block(block)

    def add(self, key: str, value: object) -> None:
        """Add `value` under `key`, even if it is larger than `max_memory_bytes`."""
        self._writer.add_of_any_size(key, value, when_full="wait")

    def close(self) -> None:
        """Wait for pending copies, and add all remaining tensors and blocks."""
        self._lane.shutdown()
        self._raise_failure()
        with self._lock:
            self._add_pending()
            while self._unwritten:
                self.add(*self._unwritten[0])
                self._unwritten.pop(0)

    def cancel(self) -> None:
        """Discard all pending tensors and blocks."""
        self._lane.shutdown(cancel_futures=True)
        self._pending.clear()
        self._unwritten.clear()

    # ------------------------------------------------------------------------------- tensors

    def _fits_file(self, nbytes: int) -> bool:
        limit = self._options.max_bytes
        fits = limit is None or self.stored_nbytes + nbytes <= limit
        self.n_dropped += not fits
        return fits

    def _store_large(self, name: str, tensor: Tensor, nbytes: int) -> str:
        value, keeps = tensor.detach(), True
        if tensor.layout == torch.strided and not tensor.is_nested:
            nbytes = stored_nbytes(tensor)
            keeps = keeps_storage(tensor)
        if not self._fits_file(nbytes):
            return _NO_BYTES
        if not keeps:
            own = unexpanded(value).clone(memory_format=torch.contiguous_format)
            value = own.expand(tensor.shape)
        why_not = self._add_tensor(name, value, copy=keeps)
        self.stored_nbytes += 0 if why_not else nbytes
        return why_not

    def _add_tensor(self, name: str, tensor: Tensor, *, copy: bool) -> str:
        """Add a tensor to the file; return "", or the reason why it was left out."""
        try:
            with _naming(name):
                added = self._writer.add(name, tensor, copy=copy)
        except (SaveError, StagingFullError):
            raise
        except _UNSAVABLE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return self._drop(f"cannot be saved: {reason}"[:_MAX_REASON])
        return "" if added else self._drop(_NO_ROOM)

    def _add_pending(self) -> None:
        pending, self._pending, self._pending_nbytes = self._pending, {}, 0
        try:
            if pending and not self._writer.add_group(pending, copy=False):
                self._dropped.update(dict.fromkeys(pending, _NO_ROOM))
                self.n_dropped += len(pending)
        except (SaveError, StagingFullError):
            raise
        except _UNSAVABLE:
            for name, tensor in pending.items():  # none of the group was added
                if why_not := self._add_tensor(name, tensor, copy=False):
                    self._dropped[name] = why_not

    def _drop(self, why: str) -> str:
        self.n_dropped += 1
        return why

    # -------------------------------------------------------------------------------- blocks

    def _finish_block(self, block: Block) -> None:
        with self._lock:
            self._add_pending()
            values = block.values
            if self._dropped:
                values = [self._without_dropped(row) for row in values]
            self._unwritten.append((block.key, block_to_plain(block.calls, values)))
            when_full: WhenFull = "wait" if self._options.when_full == "wait" else "drop"
            while self._unwritten:
                if not self._writer.add_of_any_size(*self._unwritten[0], when_full=when_full):
                    return  # no room now: the next call adds the rest
                self._unwritten.pop(0)

    def _without_dropped(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        why_not = self._dropped.get(row[_STORED])
        if why_not is None:
            return row
        return (*row[:_STORED], "", row[_STORED + 1], why_not, *row[_NOTE + 1 :])

    # -------------------------------------------------------------------- from accelerators

    def _reserve(self, nbytes: int) -> bool:
        """Reserve `nbytes`; if memory is full, wait, raise or return False, as `when_full` says."""
        with self._room:
            if self._options.when_full == "wait":
                self._room.wait_for(lambda: self._failure is not None or self._has_room(nbytes))
            self._raise_failure()
            if not self._has_room(nbytes):
                if self._options.when_full == "raise":
                    raise StagingFullError.no_room(
                        nbytes, self._staged_nbytes, self._max_staged_bytes, "max_memory_bytes"
                    )
                return False
            self._staged_nbytes += nbytes
        return True

    def _has_room(self, nbytes: int) -> bool:
        return not self._staged_nbytes or self._staged_nbytes + nbytes <= self._max_staged_bytes

    def _take_staged(self, staged: Staged, nbytes: int) -> None:
        """Wait until the copy of a tensor is complete, and add the copy to the file."""
        try:
            if self._failure is None:
                self._finish_tensor(staged)
        except BaseException as error:
            self._failure = error
        finally:
            staged.host = None
            with self._room:
                self._staged_nbytes -= nbytes
                self._room.notify_all()

    def _finish_tensor(self, staged: Staged) -> None:
        host, device = staged.host, staged.event.device
        assert host is not None
        with _current(device):
            staged.event.synchronize()
            staged.event = None
        if self._options.statistics:
            staged.found = statistics_of(host, 1)  # one thread: training needs the other cores
        if staged.name and not self._writer.add(staged.name, host, copy=False):
            self._dropped[staged.name] = self._drop(_NO_ROOM)

    def _finish_staged(self, block: Block) -> None:
        try:
            if self._failure is None:
                for staged in block.staged:
                    row = block.values[staged.row]
                    block.values[staged.row] = (*row[:_STATISTICS], staged.found)
                self._finish_block(block)
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
