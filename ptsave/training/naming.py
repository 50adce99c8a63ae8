"""Names of checkpoint files: one file for a step, or one part of each rank.

A step saved by several ranks is complete when the parts of all ranks exist.  The names of parts
hold a session and a number, so parts of different saves never make one checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

_WHOLE = r"step-([0-9]+)\.pt"
_PART = r"step-([0-9]+)\.([0-9a-f]{16})-([0-9]{1,9})\.rank-([0-9]{1,9})-of-([0-9]{1,9})\.pt"
_MIN_N_DIGITS = 8  # names sort like their steps below a hundred million


class WholeFiles:
    """Names of whole checkpoints: ``step-<number>.pt``, with any number of leading zeros."""

    def checkpoints(self, files: Iterable[str]) -> dict[int, list[str]]:
        """Return the files of each complete step; this process reads the first file."""
        names: dict[int, list[str]] = {}
        for name in files:
            if match := re.fullmatch(_WHOLE, name):
                names.setdefault(int(match[1]), []).append(name)
        for step, several in names.items():
            several.sort(key=lambda name: (name != self.name_of(step), name))
        return names

    def judged(self, names: list[str]) -> str:
        """Return the file whose entries decide whether a step stays: the same on all ranks."""
        return names[0]

    def dead(self, files: Iterable[str]) -> list[str]:
        """Return the files to remove: no checkpoint needs them, and no process writes them."""
        return []

    def is_checkpoint(self, name: str) -> bool:
        """Return whether a file of this name is a checkpoint, or a part of one."""
        return re.fullmatch(_WHOLE, name) is not None

    def name_of(self, step: int) -> str:
        """Return the file name for a step that has no checkpoint."""
        return f"step-{step:0{_MIN_N_DIGITS}d}.pt"

    def new_name(self, step: int, names: list[str]) -> str:
        """Return the name to save a step under; `names` are the step's existing files."""
        return names[0] if names else self.name_of(step)

    def remark(self, files: Iterable[str]) -> str:
        """Return a remark in brackets on the other files, or an empty string."""
        sizes = {part.size for part in map(_part, files) if part}
        return f" (but parts of checkpoints of {_listed(sizes)} ranks)" if sizes else ""


class _Part(NamedTuple):
    """The parsed file name of one rank's part of a save."""

    step: int
    session: str
    repeat: int
    size: int
    rank: int

    @property
    def save(self) -> tuple[int, str, int]:
        return self.step, self.session, self.repeat


class Parts:
    """Names of checkpoints that consist of one part per rank.

    `session` is 16 hexadecimal digits: the same on all ranks, and higher than in earlier jobs.  The
    methods that `WholeFiles` has, too, mean the same.
    """

    def __init__(self, rank: int, size: int, session: str) -> None:
        self._rank, self._size, self._session = rank, size, session
        self._saves: list[tuple[int, str, int]] = []  # saves of this process, in order

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
        """Return the parts of saves that are replaced, or that can no longer be completed.

        The saves of one rank end in the order in which they began.  So once a later save is
        complete, an incomplete earlier save stays incomplete.
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
        """Return this rank's part of the save that the part `name` belongs to."""
        return self.of_rank(self._rank, name)

    def of_rank(self, rank: int, name: str) -> str:
        """Return a rank's part of the save that the part `name` belongs to."""
        part = _part(name)
        if part is None or part.size != self._size:
            raise ValueError(f"{name!r} is not a part of {self._size} ranks")
        return _name(part.save, rank, self._size)

    def save_of(self, name: str) -> str:
        """Return the prefix that the names of all parts of a save share."""
        return name.partition(".rank-")[0]

    def remark(self, files: Iterable[str]) -> str:
        files = list(files)
        sizes = {part.size for part in map(_part, files) if part} - {self._size}
        if sizes:
            return f" (but parts of checkpoints of {_listed(sizes)} ranks, not {self._size})"
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
    # A name that pads its numbers differently is not a file of ptsave.
    return part if name == _name(part.save, part.rank, part.size) else None


def _listed(sizes: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(sizes)))


Naming: TypeAlias = "WholeFiles | Parts"
