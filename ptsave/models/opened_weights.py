"""The open files of a model, which this process reads, or another rank for it."""

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

__all__ = ["LocalWeights", "opened_weights"]


class LocalWeights:
    """Files that this process reads.

    Parameters
    ----------
    opened : OpenShards
        The files, open.

    Attributes
    ----------
    shards : list of Shard
        The files.
    entries : list of Entry
        Their tensors.
    """

    def __init__(self, opened: OpenShards) -> None:
        self.shards, self.entries = opened

    def agree(self) -> None:
        """Do nothing: there are no others."""

    def filling(self, reader: ShardReader, progress: ProgressCallback | None) -> Filling:
        """Return the object that fills a model."""
        return Filling(reader, progress)


@contextmanager
def opened_weights(
    f: Any, storage_options: Mapping[str, Any] | None, group: Any
) -> Iterator[LocalWeights | GroupWeights]:
    """Open a model's files, by one rank of a group if there is one; as for `load_model`."""
    if has_others(group):
        from ptsave.models.group_weights import group_weights

        with group_weights(f, storage_options, group) as received:
            yield received
        return
    with ExitStack() as stack:
        files = find_files(f, storage_options)
        yield LocalWeights(open_shards(f, files, stack))
