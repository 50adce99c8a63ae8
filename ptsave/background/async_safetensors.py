"""Saves a safetensors file in the background, as `async_save` saves a torch archive."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ptsave import _C
from ptsave.background import saves as background
from ptsave.background.save_future import SaveFuture
from ptsave.contents.safetensors import names_in_order
from ptsave.streaming.payload_sources import PayloadSources, SafetensorsPlan, check_safetensors
from ptsave.writing.planning import SaveOptions, pickle_object
from ptsave.writing.targets import scratch_folder

_abandoned: list[object] = []  # memory of the parent process, which a forked child must not free


def async_save_safetensors(
    tensors: Mapping[str, Tensor],
    path: str,
    metadata: Mapping[str, str],
    *,
    fsync: bool = False,
    when_full: Literal["wait", "raise"] = "wait",
) -> SaveFuture:
    """Copy tensors now, and later write the file that ``safetensors.torch.save_file`` would write.

    Each tensor must be contiguous and fill a storage of its own.  `path` must be local.  Options,
    result and errors are as for :func:`ptsave.async_save`.
    """
    check_safetensors(tensors)
    # Copied in the file's order, so that the file can be written during the copy.
    plain = {name: tensors[name].detach() for name in names_in_order(tensors)}
    live = [each for each in plain.values() if each.device.type == "cpu"]
    _, storages = pickle_object(live, pickle, 2)
    nbytes = sum(each.untyped_storage().nbytes() for each in live)
    with ExitStack() as undo:  # explicit, because a traceback may keep the memory alive
        reservation = background.reserve(nbytes, None, wait=when_full == "wait")
        undo.callback(reservation.release)
        snapshot = _C.Snapshot(storages)
        undo.callback(snapshot.release)
        path = os.path.abspath(path)
        save = background.BackgroundSave(
            cast("_C.WritePlan", _PlanOfCopies(plain, snapshot, path, metadata)),
            snapshot,
            reservation,
            path,
            SaveOptions(fsync=fsync),
            compute_crcs=False,
        )
        undo.pop_all()  # from here on, `save` releases the memory
    background.start(save, stage_in_background=False)
    return save.future


def covers_its_storage(tensor: Tensor) -> bool:
    """Return whether a tensor uses all bytes of its storage."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


class _PlanOfCopies:
    """Plans a file of a snapshot's copies; the constructor makes the copies from accelerators.

    It wraps the engine's plan and adds the methods of ``_C.WritePlan`` that `BackgroundSave` needs.
    """

    is_pinned = False

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        snapshot: _C.Snapshot,
        path: str,
        metadata: Mapping[str, str],
    ) -> None:
        memory = iter(_C.untyped_storages(snapshot.storages))
        copies = {}
        for name, each in tensors.items():
            if each.device.type == "cpu":
                empty = torch.empty(0, dtype=each.dtype)
                copies[name] = empty.set_(next(memory), 0, each.shape, each.stride())
            else:
                copies[name] = each.cpu()
        with ExitStack() as stack:  # stays empty, because payloads in memory need no files
            sources = PayloadSources(stack, scratch_folder(path))
            plan = SafetensorsPlan(copies, path, sources, metadata)
        self._memory: object = copies
        self._plan: Any = plan.engine_plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def begin_staging(self, **_: object) -> None:
        """Do nothing: the constructor has copied the tensors on accelerators."""

    def stage(self, **_: object) -> None:
        """Do nothing: the snapshot copies the tensors in CPU memory."""

    def release(self) -> None:
        self._plan = self._memory = None

    def abandon(self) -> None:
        _abandoned.append((self._plan, self._memory))
