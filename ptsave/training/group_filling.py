"""Fills existing tensors from an archive that one rank of a process group reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.group_archive import GroupArchive
from ptsave.archive.group_records import CHECKED, PLANNED
from ptsave.archive.part_copies import StorageView, is_viewable
from ptsave.support.calls import ProgressCallback


@dataclass(frozen=True)
class _Copy:
    """A planned copy into a tensor that exists.

    The values are at `view` in `record`.  Without a view they are in `source`, which may be filled
    only together with its record.
    """

    target: Tensor
    record: int | None
    view: StorageView | None
    source: Tensor | None

    @property
    def key(self) -> Any:
        """A key that is equal for equal copies, as for tied parameters; None without a view."""
        where = (self.target.device, self.target.data_ptr(), self.target.dtype)
        shape = (tuple(self.target.shape), self.target.stride())
        return None if self.view is None else (where, shape, self.record, self.view)


class GroupFiller:
    """A `restoring.Filler` that takes its bytes from what the group's reader sends.

    All storages of the archive are reserved already.
    """

    is_shared = True

    def __init__(self, archive: GroupArchive, *, verify: bool) -> None:
        self._archive = archive
        self._verify = verify
        self._copies: list[_Copy] = []
        self._filled: set[int] = set()
        self._changed: set[int] = set()

    @property
    def _engine(self) -> _C.Reader:
        return self._archive.reader.engine

    def agree(self) -> None:
        self._archive.wait(CHECKED)

    def begin(self) -> None:
        self._archive.wait(PLANNED)

    def copy(self, target: Tensor, source: Tensor) -> None:
        record = self._engine.record_of(source)
        if record is None or self.is_filled(record) or not is_viewable(source):
            self._copies.append(_Copy(target, record, None, source))
        else:
            self._copies.append(_Copy(target, record, StorageView.of(source), None))

    def fill(self, records: Iterable[int], progress: ProgressCallback | None) -> None:
        copies, self._copies = self._copies, []
        whole = {copy.record for copy in copies if copy.source is not None}
        wanted = {*records, *(record for record in whole if record is not None)} - self._filled
        self._archive.reader.progress = progress
        for turn in _turns(copies) or [[]]:
            self._make(wanted - self._filled, turn)

    def read(self, view: Tensor, max_gap: int) -> Tensor:
        record = self._engine.record_of(view)
        if record is not None and not self.is_filled(record):
            self._make({record}, [])
        return view

    def is_filled(self, record: int) -> bool:
        return record in self._filled

    def changed(self) -> set[int]:
        return self._changed

    def _make(self, records: Collection[int], copies: Sequence[_Copy]) -> None:
        """Fill storages and make copies, in the file's order; targets must not overlap."""
        by_record: defaultdict[int, list[tuple[Tensor, StorageView]]] = defaultdict(list)
        for copy in copies:
            if copy.view is not None and copy.record is not None:
                by_record[copy.record].append((copy.target, copy.view))

        def take(record: int, begin: int, part: Tensor) -> None:
            if record in records:
                self._engine.storage(record)[begin : begin + len(part)].copy_(part)
            for target, view in by_record.get(record, ()):
                self._changed.add(record)
                view.copy_part(target, part, begin)

        wanted = {*records, *by_record}
        if wanted:
            self._archive.receive(wanted, take, verify=self._verify)
        self._filled.update(records)
        with torch.no_grad():
            for copy in copies:
                if copy.source is not None:
                    if copy.record is not None:
                        self._changed.add(copy.record)
                    copy.target.copy_(copy.source)


def _turns(copies: Iterable[_Copy]) -> list[list[_Copy]]:
    """Return copies in groups to be made one after the other; equal copies are made once.

    Targets in a group do not overlap, so the order of its copies makes no difference.
    """
    turns: list[list[_Copy]] = []
    seen: set[Any] = set()
    places = []
    for i, copy in enumerate(copies):
        key = copy.key
        if copy.target.numel() > 0 and (key is None or key not in seen):
            seen.add(key)
            places.append((*_memory_of(copy.target), i, copy))
    places.sort(key=lambda place: place[:4])
    for _, near in groupby(places, _Cluster()):
        for turn, place in enumerate(sorted(near, key=lambda place: place[3])):
            turns += [[]] if turn == len(turns) else []
            turns[turn].append(place[4])
    return turns


class _Cluster:
    """Numbers memory ranges that come in order; overlapping ranges get the same number."""

    def __init__(self) -> None:
        self._number = 0
        self._device, self._end = "", 0

    def __call__(self, place: tuple[str, int, int, int, _Copy]) -> int:
        device, begin, end, *_ = place
        if device != self._device or begin >= self._end:
            self._number += 1
            self._device, self._end = device, end
        self._end = max(self._end, end)
        return self._number


def _memory_of(tensor: Tensor) -> tuple[str, int, int]:
    """Return a tensor's device, and the addresses where its memory begins and ends."""
    begin = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), begin, begin + (last + 1) * tensor.itemsize
