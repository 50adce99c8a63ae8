"""Fills existing tensors from an archive that one rank of a process group reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.group_archive import GroupArchive, StorageView, is_viewable
from ptsave.state.copying import overlapping
from ptsave.support.calls import ProgressCallback
from ptsave.tree.extents import span_of


@dataclass(frozen=True)
class _Copy:
    """A copy into an existing tensor, to be made later.

    If `view` is set, the values are in record number `record`, at the view's offset, with its shape
    and strides.  Otherwise the values are in `source`, once its record has been read.
    """

    target: Tensor
    record: int | None
    view: StorageView | None
    source: Tensor | None

    @property
    def key(self) -> Any:
        """A key that equal copies (because of tied parameters) share; None without a view."""
        where = (self.target.device, self.target.data_ptr(), self.target.dtype)
        shape = (tuple(self.target.shape), self.target.stride())
        return None if self.view is None else (where, shape, self.record, self.view)


class GroupFiller:
    """Does the same as `EngineFiller`, but with bytes that another rank reads and sends."""

    def __init__(self, archive: GroupArchive, *, verify: bool) -> None:
        self._archive = archive
        self._verify = verify
        self._copies: list[_Copy] = []
        self._filled: set[int] = set()
        self._changed: set[int] = set()

    @property
    def _engine(self) -> _C.Reader:
        return self._archive.reader.engine

    def copy(self, target: Tensor, source: Tensor) -> None:
        record = self._engine.record_of(source)
        if record is None or self.is_filled(record) or not is_viewable(source):
            self._copies.append(_Copy(target, record, None, source))
        else:
            self._copies.append(_Copy(target, record, StorageView.of(source), None))

    def fill(self, records: Iterable[int], progress: ProgressCallback | None) -> None:
        copies, self._copies = _distinct(self._copies), []
        # Copies without a view, and copies into overlapping targets, are made at the end, in order,
        # from storages that are filled by then.
        mixed = overlapping((*_span_of(copy.target), i) for i, copy in enumerate(copies))
        late = [c for i, c in enumerate(copies) if c.view is None or i in mixed]
        direct = [c for i, c in enumerate(copies) if c.view is not None and i not in mixed]
        whole = {*records, *(copy.record for copy in late if copy.record is not None)}
        self._archive.progress = progress
        self._receive(whole - self._filled, direct)
        with torch.no_grad():
            for copy in late:
                if copy.record is not None:
                    self._changed.add(copy.record)
                if copy.source is not None:
                    copy.target.copy_(copy.source)
                elif copy.view is not None and copy.record is not None:
                    copy.view.copy_part(copy.target, self._engine.storage(copy.record), 0)

    def is_filled(self, record: int) -> bool:
        return record in self._filled

    def changed(self) -> set[int]:
        return self._changed

    def _receive(self, records: Collection[int], copies: Sequence[_Copy]) -> None:
        """Fill the storages of `records`, and make `copies`, whose targets must not overlap."""
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


def _distinct(copies: Iterable[_Copy]) -> list[_Copy]:
    """Leave out copies of empty tensors, and duplicates, which tied parameters cause."""
    found: dict[Any, _Copy] = {}
    for copy in copies:
        if copy.target.numel():
            found.setdefault(id(copy) if copy.key is None else copy.key, copy)
    return [*found.values()]


def _span_of(tensor: Tensor) -> tuple[str, int, int]:
    """Return a tensor's device, and the addresses where its memory begins and ends."""
    begin, end = span_of(tensor)
    address = tensor.data_ptr()
    return str(tensor.device), address, address + end - begin
