"""Loads an archive that one rank of a process group reads for all."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ptsave.archive.filling import verifies_storages
from ptsave.archive.group_archive import GroupArchive, group_archive
from ptsave.archive.group_records import PLANNED
from ptsave.archive.loading import LoadOptions, rebuild
from ptsave.archive.unpickling import unpickle_received
from ptsave.archive.weights_only import resolve_weights_only
from ptsave.errors import UnsupportedSourceError
from ptsave.support.calls import progress_bar
from ptsave.support.torch_serialization import log_api_usage, restricted_unpickler


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
    with progress_bar(options.progress, "loading", reader.engine.nbytes) as reader.progress:
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
