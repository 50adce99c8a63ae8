"""Finds the newest checkpoint that is whole on all ranks, before a restore changes any target."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol

from ptsave.archive.damage import consequences, entries_using, find_damage
from ptsave.archive.opening import open_source_archive, spans_of
from ptsave.contents.opening import open_file
from ptsave.errors import CheckpointWarning, CorruptCheckpointError, add_note
from ptsave.sources.locations import position_kept
from ptsave.sources.ranges import RangeSource, open_source
from ptsave.support.calls import warn_user
from ptsave.support.text import some_of
from ptsave.training.directory import GONE, CheckpointDirectory
from ptsave.training.manifests import digest_of

if TYPE_CHECKING:
    from ptsave.archive.damage import Damage
    from ptsave.archive.reader import RecordReader
    from ptsave.support.rank_groups import Ranks

_MAX_NAMED = 8


class Candidate(Protocol):
    """The part of one save that belongs to this rank."""

    step: int
    source: Any  # the open file, or the URL
    damage: Exception | None

    def verify(self) -> str | None:
        """Read the whole file; return None if it is whole, "" if it was removed, or its damage."""


class Places(Protocol):
    """The checkpoints of a run, in one directory or in several places."""

    @property
    def path(self) -> Path | str: ...

    def listing(self) -> Any:
        """Return this rank's list of checkpoints."""

    def keys(self, found: list[Any]) -> list[Any]:
        """Return keys of saves, which sort by step; `found` has the `listing` of each rank."""

    def candidate(self, key: Any, stack: ExitStack) -> Candidate:
        """Return this rank's part of a save; `stack` will close its file."""

    def no_checkpoint(self, step: int | None, steps: list[int]) -> FileNotFoundError:
        """Return the error for a `step` (None: any step) that is not among the `steps`."""


@contextmanager
def newest_whole(
    places: Places,
    ranks: Ranks | None,
    step: int | None = None,
    *,
    fallback: bool = True,
) -> Iterator[Any]:
    """Yield the open file, or the URL, of the highest step that is whole on all `ranks`.

    Without `fallback`, only the highest step (or `step`) is tried.  Warns of damaged steps.  If no
    step is whole, all ranks raise the error of the highest step, with a note on the others.
    """

    def share(task: str, call: Callable[[], Any]) -> list[Any]:
        return [call()] if ranks is None else _shared(ranks, str(places.path), task, call)

    looked_at: dict[Any, Candidate] = {}
    damaged: dict[Candidate, str] = {}
    steps: list[int] = []
    while fallback or not damaged:  # again if the newest was removed meanwhile
        keys = places.keys(share("list the checkpoints", places.listing))
        steps = sorted(_step_of(key) for key in keys)
        wanted = {key for key in keys if step is None or _step_of(key) == step}
        key = max(wanted - looked_at.keys(), default=None)
        if key is None:
            break
        with ExitStack() as stack:
            candidate = places.candidate(key, stack)
            found = share("verify its checkpoint", candidate.verify)
            if all(each is None for each in found):
                if damaged:
                    message = (
                        f"step {candidate.step} is restored, because later steps are damaged: "
                    )
                    message += "; ".join(damaged.values())
                    warn_user(f"{places.path}: {message}", CheckpointWarning)
                yield candidate.source
                return
        looked_at[key] = candidate
        if reports := [*dict.fromkeys(filter(None, found))]:
            damaged[candidate] = "; ".join(reports)

    def refuse() -> None:
        for candidate in damaged:
            if candidate.damage is not None:
                raise candidate.damage
            return  # another rank raises the error
        raise places.no_checkpoint(step, steps)

    try:
        share("find a checkpoint", refuse)
    except Exception as error:
        if others := [*damaged.values()][1:]:
            add_note(error, f"no other step is whole: {'; '.join(others)}")
        raise


def _shared(ranks: Ranks, name: str, task: str, call: Callable[[], Any]) -> list[Any]:
    """Return what `call` returns on each rank; if one rank's call raises, all ranks raise."""
    from ptsave.support.group_call import together

    value = error = None
    try:
        value = call()
    except Exception as failure:
        error = failure
    failure_of = f"rank {{}} could not {task}"
    return together(ranks.gather, ranks.rank, value, error, name=name, what=failure_of)


def _step_of(key: Any) -> int:
    return int(key[0] if isinstance(key, tuple) else key)


class OneDirectory:
    """The checkpoints of one directory, as `Places`; `prune` keeps a step that is being read."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.path = directory.path
        self.listing = directory.steps
        self.no_checkpoint = directory.no_checkpoint
        self._directory = directory

    def keys(self, found: list[Any]) -> list[Any]:
        return list(found[0])

    def candidate(self, key: Any, stack: ExitStack) -> Candidate:
        return _Candidate(self._directory, key, stack)


class _Candidate:
    """A step's checkpoint, or this rank's part of it; `stack` closes the file."""

    source: Any = None  # the open file, or the URL
    damage: Exception | None = None

    def __init__(self, directory: CheckpointDirectory, step: int, stack: ExitStack) -> None:
        self.step = step
        self._directory = directory
        self._stack = stack

    def verify(self) -> str | None:
        """Read the whole file; return None if it is whole, "" if it was removed, or its damage.

        An OSError that does not show damage is raised.
        """
        directory = self._directory
        try:
            self.source = self._stack.enter_context(directory.held_open(self.step))
            read_whole(self.source, directory.folder.storage_options)
        except CorruptCheckpointError as error:
            self.damage = error
            return error.brief
        except OSError as error:
            if error.errno in GONE and self.step not in directory.steps():
                return ""
            if error.errno not in GONE and not _is_unreadable(error, directory.path):
                raise
            self.damage = error
            return str(error)
        return None


def _is_unreadable(error: Exception, place: Path | str) -> bool:
    """Whether a disk cannot read a sector; at a URL, this number may mean a lost connection."""
    return isinstance(error, OSError) and error.errno == errno.EIO and isinstance(place, Path)


def read_whole(
    f: Any,
    storage_options: Mapping[str, Any] | None,
    digest: Callable[[], str | None] = lambda: None,
) -> None:
    """Read all of a checkpoint; raise a CorruptCheckpointError for damage, and name its entries.

    A file without checksums is compared with its `digest`, if there is one, and loaded completely,
    because only this shows its damage.
    """
    with position_kept(f), closing(open_source(f, storage_options)) as source:
        if source.kind == "zip":
            _compare(source, digest)
        try:
            open_file(source)
        except CorruptCheckpointError:
            raise
        except UnpicklingError:
            return  # not damage: the restore decides whether it may unpickle such an object


def _compare(source: RangeSource, digest: Callable[[], str | None]) -> None:
    """Compare all records of an archive with their checksums; without these, the `digest`."""
    with closing(open_source_archive(source, verify=True)) as reader:
        if damage := find_damage(reader, spans_of(reader).find_damage, None):
            raise _error_of(reader, damage)
        if reader.engine.storages_have_crcs or (wanted := digest()) is None:
            return
        if wanted != digest_of(source):
            message = f"{source.name}: its XXH3-128 is not {wanted} as in its manifest"
            raise CorruptCheckpointError(message, path=source.name)


def _error_of(reader: RecordReader, damage: list[Damage]) -> Exception:
    for each in damage:
        place = reader.path if reader.is_fetched else Path(reader.path)
        if isinstance(each.error, OSError) and not _is_unreadable(each.error, place):
            return each.error
    first = damage[0]
    entries = entries_using(reader, {each.record for each in damage})
    message = f"{reader.path}: record {first.record} at offset {first.offset}: {first.reason}"
    message += consequences(len(damage), some_of(entries, _MAX_NAMED))
    return CorruptCheckpointError(
        message, path=reader.path, record=first.record, offset=first.offset, entries=entries
    )
