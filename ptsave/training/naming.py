"""Names of the files of checkpoints: one for a step, or a part of each rank.

A file of such a name is complete, because only a rename makes one.  A step of several ranks is
complete when the parts of all are there.  Parts of one save have a session and a number in their
names, so that parts of different saves are never taken for one checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

__all__ = ["Naming", "Parts", "WholeFiles"]

_WHOLE = r"step-([0-9]+)\.pt"
_PART = r"step-([0-9]+)\.([0-9a-f]{16})-([0-9]{1,9})\.rank-([0-9]{1,9})-of-([0-9]{1,9})\.pt"
_MIN_N_DIGITS = 8  # so that for a hundred million steps the order of names is that of steps


class Naming(Protocol):
    """Which files are checkpoints."""

    def checkpoints(self, files: Iterable[str]) -> dict[int, list[str]]:
        """Return the files of each complete step, the one that this process reads first."""

    def judged(self, names: list[str]) -> str:
        """Return the file whose entries decide whether a step stays: for all ranks the same."""

    def dead(self, files: Iterable[str]) -> list[str]:
        """Return the files that belong to no checkpoint, and to none that is being written."""

    def is_checkpoint(self, name: str) -> bool:
        """Return whether a file of this name is a checkpoint, or a part of one."""

    def name_of(self, step: int) -> str:
        """Return the name of a step that is not there."""

    def new_name(self, step: int, names: list[str]) -> str:
        """Return the name to save a step under; `names` are the files of it that are there."""

    def remark(self, files: Iterable[str]) -> str:
        """Return a remark on other files that are there, in brackets, or nothing."""


class WholeFiles:
    """The file ``step-<number>.pt`` is a checkpoint, however many zeros are before the number."""

    def checkpoints(self, files: Iterable[str]) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for name in files:
            if match := re.fullmatch(_WHOLE, name):
                names.setdefault(int(match[1]), []).append(name)
        return {step: self._own_first(step, several) for step, several in names.items()}

    def _own_first(self, step: int, names: list[str]) -> list[str]:
        if len(names) == 1:
            return names
        return sorted(names, key=lambda name: (name != self.name_of(step), name))

    def judged(self, names: list[str]) -> str:
        return names[0]

    def dead(self, files: Iterable[str]) -> list[str]:
        return []

    def is_checkpoint(self, name: str) -> bool:
        return re.fullmatch(_WHOLE, name) is not None

    def name_of(self, step: int) -> str:
        return f"step-{step:0{_MIN_N_DIGITS}d}.pt"

    def new_name(self, step: int, names: list[str]) -> str:
        return names[0] if names else self.name_of(step)

    def remark(self, files: Iterable[str]) -> str:
        sizes = sorted({part.size for part in map(_part, files) if part})
        if not sizes:
            return ""
        return f" (but parts of checkpoints of {_listed(sizes)} ranks)"


class _Part(NamedTuple):
    """A file's name: which save of which step, and whose part of it."""

    step: int
    session: str
    repeat: int
    size: int
    rank: int

    @property
    def save(self) -> tuple[int, str, int]:
        return self.step, self.session, self.repeat


class Parts:
    """The parts of a number of ranks are a checkpoint.

    Parameters
    ----------
    rank, size : int
        Whose part this process writes and reads, and how many there are.
    session : str
        16 hexadecimal digits that are the same on all ranks, and higher than those of earlier jobs.
    """

    def __init__(self, rank: int, size: int, session: str) -> None:
        self._rank, self._size, self._session = rank, size, session
        self._saves: list[tuple[int, str, int]] = []  # of this process, in their order

    def checkpoints(self, files: Iterable[str]) -> dict[int, list[str]]:
        steps: dict[int, list[str]] = {}
        for save in sorted(self._complete(files), reverse=True):  # the newest of a step first
            names = steps.setdefault(save[0], [])
            ranks = sorted(range(self._size), key=lambda rank: rank != self._rank)
            names += [_name(save, rank, self._size) for rank in ranks]
        return steps

    def judged(self, names: list[str]) -> str:
        return self.of_rank(0, names[0])

    def dead(self, files: Iterable[str]) -> list[str]:
        """Return the parts of saves that a later one has replaced, or outlived.

        Saves of one rank end in their order.  So if a later one is complete, what lacks parts will
        lack them for ever.
        """
        files = list(files)
        complete = self._complete(files)
        return [
            name
            for name in files
            if (part := _part(name))
            and part.size == self._size
            and self._is_dead(part.save, complete)
        ]

    def _is_dead(self, save: tuple[int, str, int], complete: set[tuple[int, str, int]]) -> bool:
        if any(other[0] == save[0] and other[1:] > save[1:] for other in complete):
            return True
        if save in complete:
            return False
        if any(other[1] > save[1] for other in complete):
            return True
        later = self._saves[self._saves.index(save) + 1 :] if save in self._saves else []
        return any(other in complete for other in later)

    def _complete(self, files: Iterable[str]) -> set[tuple[int, str, int]]:
        ranks: dict[tuple[int, str, int], set[int]] = {}
        for part in map(_part, files):
            if part and part.size == self._size and part.rank < self._size:
                ranks.setdefault(part.save, set()).add(part.rank)
        return {save for save, there in ranks.items() if len(there) == self._size}

    def is_checkpoint(self, name: str) -> bool:
        return _part(name) is not None

    def name_of(self, step: int) -> str:
        count = sum(save[0] == step for save in self._saves)
        return _name((step, self._session, count), self._rank, self._size)

    def new_name(self, step: int, names: list[str]) -> str:
        name = self.name_of(step)
        part = _part(name)
        assert part is not None
        self._saves.append(part.save)
        return name

    def own(self, name: str) -> str:
        """Return the name of this rank's part, given that of another."""
        return self.of_rank(self._rank, name)

    def of_rank(self, rank: int, name: str) -> str:
        """Return the name of a rank's part, given that of another."""
        part = _part(name)
        if part is None or part.size != self._size:
            raise ValueError(f"{name!r} is not a part of {self._size} ranks")
        return _name(part.save, rank, self._size)

    def save_of(self, name: str) -> str:
        """Return the beginning that the names of all parts of a save share."""
        return name.partition(".rank-")[0]

    def remark(self, files: Iterable[str]) -> str:
        files = list(files)
        sizes = {part.size for part in map(_part, files) if part} - {self._size}
        if sizes:
            return (
                f" (but parts of checkpoints of {_listed(sorted(sizes))} ranks, not {self._size})"
            )
        if WholeFiles().checkpoints(files):
            return " (but checkpoints of one rank)"
        return ""


def _name(save: tuple[int, str, int], rank: int, size: int) -> str:
    step, session, count = save
    return f"step-{step:0{_MIN_N_DIGITS}d}.{session}-{count}.rank-{rank}-of-{size}.pt"


def _part(name: str) -> _Part | None:
    match = re.fullmatch(_PART, name)
    if match is None:
        return None
    part = _Part(int(match[1]), match[2], int(match[3]), size=int(match[5]), rank=int(match[4]))
    # Only as it would be written: other spellings of a number are somebody else's files.
    return part if name == _name(part.save, part.rank, part.size) else None


def _listed(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
