"""Coordinates checkpoints that several ranks save and restore together, each rank its own part.

Ranks do not communicate when they save a step.  A step is complete once the parts of all ranks
exist.  So if a rank dies, the previous step stays the latest step.
"""

from __future__ import annotations

import errno
import posixpath
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptsave.errors import CheckpointWarning, SaveError
from ptsave.support.calls import warn_user
from ptsave.support.ranks import check_rank_is_named, group_of_job
from ptsave.training.directory import Parts, PartsOfHosts

if TYPE_CHECKING:
    from ptsave.support.rank_groups import Ranks

# How long another rank may take to remove its part of an old checkpoint.
_REMOVAL_S, _PAUSE_S = 1.0, 0.02


def check_ranks(directory: str, rank: int | None, world_size: int | None, group: Any) -> None:
    """Raise an error if the arguments contradict each other, or do not tell this process's rank."""
    if group is not None and (rank is not None or world_size is not None):
        raise TypeError("process_group already sets rank and world_size: leave them out")
    if world_size is not None and rank is None:
        raise TypeError(f"world_size={world_size} needs a rank: the number of this process")
    if world_size is not None and rank is not None and rank >= world_size:
        raise ValueError(f"rank must be less than world_size ({world_size}), not {rank}")
    if group is None and world_size is None and group_of_job() is None:
        check_rank_is_named(directory, rank)


def rank_parts(
    place: Path | str,
    rank: int | None,
    world_size: int | None,
    group: Any,
    local: Path | str | None = None,
) -> RankParts | None:
    """Return the `RankParts` of a directory, or None if each checkpoint is one file.

    All ranks must call this, because it waits for them.  Without a process group, the ranks
    communicate through files in the directory.  So a URL raises a ValueError, unless there is a
    `local` directory, which the ranks of one host share: then the ranks can only restore.
    """
    if rank is not None and world_size is None:
        return None
    if group is None and world_size is None:
        group = group_of_job()
        if group is None:
            return None
    if world_size == 1:
        return None
    from ptsave.support.rank_groups import FileRanks, GroupRanks, LoneRank

    if world_size is None:
        return RankParts(GroupRanks(group, str(place)), place, local)
    assert rank is not None
    if isinstance(place, str) and local is not None:
        return RankParts(LoneRank(rank, world_size), place, local)
    if isinstance(place, str):
        raise ValueError(
            f"{place}: without a process group, ranks cannot save to a URL: call "
            "torch.distributed.init_process_group() first, and leave rank and world_size out"
        )
    return RankParts(FileRanks(place, rank, world_size), place, local)


class RankParts:
    """The parts that this rank and the other ranks save to one directory or URL.

    If there is a `local` directory, parts are saved there, and only the ranks of one host share it.
    """

    naming: Parts

    def __init__(
        self,
        ranks: Ranks,
        place: Path | str,
        local: Path | str | None = None,
    ) -> None:
        from ptsave.support.rank_groups import FileRanks, LoneRank

        self.ranks = ranks
        self._is_shared = local is None
        self.is_alone = isinstance(ranks, LoneRank)  # so it can restore, but not save
        self._place = place if local is None else local
        # Without a process group, ranks find each other by their locks, so the lock exists already.
        self._lock = ranks.lock if isinstance(ranks, FileRanks) else None
        # Saves and failures since the last `settle`:
        self._saved: list[str] = []
        self._failures: list[tuple[str, str, bool, bool]] = []
        kind = Parts if local is None else PartsOfHosts
        self.naming = kind(ranks.rank, ranks.size, ranks.session)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    def begin(self) -> None:
        """Lock the directory for this rank; raise RuntimeError if this rank must not save."""
        if self.is_alone:
            raise RuntimeError(
                f"{self._place}: without a process group, ranks can restore from a URL, but not "
                "save to it: call torch.distributed.init_process_group() first"
            )
        if self._lock is None and isinstance(self._place, Path):
            from ptsave.support.rank_groups import RankLock

            self._lock = RankLock(self._place, self.ranks.rank, self.ranks.size)

    @property
    def tidies(self) -> bool:
        """Whether this rank removes old checkpoints: at a URL, which has no locks, only rank 0."""
        return self.is_first or isinstance(self._place, Path)

    def note(self, path: str) -> None:
        """Remember the path of a part that this rank begins to write."""
        self._saved.append(posixpath.basename(path))

    def fail(self, path: str, error: BaseException, *, is_there: bool, warns: bool = False) -> None:
        """Remember a failed save, and whether its file exists; any thread may call this.

        With `warns`, it is a warning on the other ranks.
        """
        message = str(error) or type(error).__name__
        self._failures.append((posixpath.basename(path), message, is_there, warns))

    def agreed(self, choose: Callable[[], str]) -> str:
        """Return the name of this rank's part of the save that rank 0 chooses.

        `choose` is called on rank 0 only, and returns the name of any part of the save.  If it
        raises an OSError, all ranks raise the error.
        """
        try:
            choice: list[Any] = [choose() if self.is_first else None]
        except OSError as error:
            choice = [error.errno, error.strerror, error.filename]
        choice = self.ranks.gather(choice)[0]
        if len(choice) > 1:
            raise OSError(*choice)
        return self.naming.own(choice[0])

    def settle(self) -> tuple[list[str], SaveError | None]:
        """Wait for all ranks; return this rank's parts of incomplete saves, and an error or None.

        The error is a failure on another rank that this rank has not noted itself.  A save that
        only some ranks began is a failure, too.  Raises RuntimeError if a rank has ended.
        """
        saved, failures = self._saved, self._failures
        self._saved, self._failures = [], []
        everyone = self.ranks.gather({"saved": saved, "failures": failures})
        begun = [{self.naming.save_of(name) for name in theirs["saved"]} for theirs in everyone]
        messages = self._messages(everyone, begun)
        # If all parts exist, the save counts as complete, even if a rank reports a failure.  An
        # older checkpoint may have been removed already, because of this save.
        missing = {
            self.naming.save_of(name)
            for theirs in everyone
            for name, _, is_there, _ in theirs["failures"]
            if not is_there
        }
        whole = set.intersection(*begun) - missing
        lost = [name for name in saved if self.naming.save_of(name) not in whole]
        known = {self.naming.save_of(name) for name, *_ in failures}
        unknown = [message for save, message in messages.items() if save not in known]
        complete = [name for name in saved if self.naming.save_of(name) not in messages]
        if complete and not unknown and (apart := self._part_not_seen(complete[-1])):
            unknown.append(apart)
        if not unknown:
            return lost, None
        message = unknown[0][0].upper() + unknown[0][1:]
        if any(failure[-1] for theirs in everyone for failure in theirs["failures"]):
            warn_user(f"{self._place}: {message}", CheckpointWarning)
            return lost, None
        return lost, SaveError(errno.EIO, message, str(self._place))

    def _part_not_seen(self, name: str) -> str:
        """Return an error message if another rank's part of a complete save is not here, or ''."""
        if not (self._is_shared and isinstance(self._place, Path)):
            return ""
        other = self.ranks.size - 1 if self.is_first else 0
        theirs = self._place / self.naming.of_rank(other, name)
        deadline = time.monotonic() + _REMOVAL_S
        while not theirs.exists() and (self._place / name).exists():
            if time.monotonic() > deadline:  # so it is not just being removed
                return (
                    f"the part of rank {other}, {theirs.name}, is not in this directory of rank "
                    f"{self.ranks.rank}: all ranks have to save to one shared directory"
                )
            time.sleep(_PAUSE_S)
        return ""

    def _messages(self, everyone: list[Any], begun: list[set[str]]) -> dict[str, str]:
        """Return why each failed save failed; the keys are what `save_of` returns for its parts."""
        messages = {
            self.naming.save_of(name): f"the part of rank {rank}, {name}, was not saved: {message}"
            for rank, theirs in enumerate(everyone)
            for name, message, *_ in theirs["failures"]
        }
        for rank, theirs in enumerate(begun):
            for save in sorted(begun[0] ^ theirs):
                there, absent = (0, rank) if save in begun[0] else (rank, 0)
                messages.setdefault(
                    save,
                    f"{save} was saved on rank {there} and not on rank {absent}: all ranks must "
                    "call save() for the same steps",
                )
        return messages

    def meet(self) -> None:
        """Wait until all ranks have called this."""
        self.ranks.gather(None)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Wait until all ranks have left their `with` blocks; if one block raises, all ranks raise.

        The other ranks raise an error of the same type.  Its message describes the block with
        `what`, for example "restore its part".
        """
        from ptsave.support.group_call import together

        ranks, name = self.ranks, str(self._place)
        what = f"rank {{}} could not {what}"
        meet = partial(together, ranks.gather, ranks.rank, name=name, what=what)
        try:
            yield
        except Exception as error:
            meet(error=error)
            raise
        meet()

    def release(self) -> None:
        """Unlock the directory, so that other jobs may save there."""
        if self._lock is not None:
            self._lock.release()
