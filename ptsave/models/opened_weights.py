"""The open files of a model, read by this process or by another rank for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ptsave.contents.checkpoint_files import find_files
from ptsave.models.filling import Filling
from ptsave.models.shards import OpenShards, ShardReader, open_shards
from ptsave.support.progress import ProgressCallback
from ptsave.support.together import has_others

if TYPE_CHECKING:
    from ptsave.models.group_weights import GroupWeights


class LocalWeights:
    """The files of a model and their tensors, read by this process."""

    def __init__(self, opened: OpenShards) -> None:
        self.shards, self.entries = opened

    def agree(self) -> None:
        """Do nothing: there are no other ranks."""

    def filling(self, reader: ShardReader, progress: ProgressCallback | None) -> Filling:
        """Return the object that fills a model."""
        return Filling(reader, progress)


@contextmanager
def opened_weights(
    f: Any, storage_options: Mapping[str, Any] | None, group: Any
) -> Iterator[LocalWeights | GroupWeights]:
    """Open a model's files as `load_model` does; with a group, one of its ranks reads."""
    if has_others(group):
        from ptsave.models.group_weights import group_weights

        with group_weights(f, storage_options, group) as received:
            yield received
        return
    with ExitStack() as stack:
        files = find_files(f, storage_options)
        yield LocalWeights(open_shards(f, files, stack))
