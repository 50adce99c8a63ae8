"""Names and removes the checkpoints in a directory, local or at a URL.

No other file lists the checkpoints, so no list can disagree with the directory.  An object store
needs no locks and no renames, because a file appears there only when it is complete.  Only one
process removes old checkpoints from an object store: the rank that saves, or rank 0.
"""

from __future__ import annotations

import errno
import math
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from ptsave.errors import CheckpointWarning, SaveError
from ptsave.sources.locations import LocalFolder, sync_path
from ptsave.writing.targets import resolve_folder

# Errors when opening a file that another process, or another host, has removed.
GONE = {errno.ENOENT, errno.ESTALE}
_MAX_TRIES = 100  # a try fails only if the file was removed meanwhile
# Behind a file's name, this makes the name of its manifest (manifests.py).
MANIFEST = ".json"


def create_directory(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, fsync: bool
) -> Path | str:
    """Make a directory for checkpoints, with its parents, and return its absolute path or its URL.

    Raises SaveError if the directory's files cannot be listed, or no file can be created in it.
    """
    folder = resolve_folder(directory, storage_options)
    if folder.is_url:
        folder.make()
        return folder.path
    path = Path(os.path.abspath(folder.path))
    try:
        created = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in created if fsync else []:
            _sync(each.parent)  # without this, power loss could remove the directory
    except (FileExistsError, NotADirectoryError):
        message = "The checkpoint directory, or one above it, is a file: use another directory"
        raise SaveError(errno.ENOTDIR, message, str(path)) from None
    except OSError as error:
        number = error.errno or errno.EIO
        message = f"The directory for checkpoints cannot be made: {os.strerror(number)}"
        raise SaveError(number, message, str(path)) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        message = (
            "Files cannot be listed and created in the directory for checkpoints: change its "
            "permissions, or use another directory"
        )
        raise SaveError(errno.EACCES, message, str(path))
    return path


def _sync(path: Path) -> None:
    try:
        sync_path(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL):
            raise
        os.sync()  # the directory itself cannot be opened or synced


class CheckpointDirectory:
    """The checkpoints of one directory; files with other names are ignored.

    A directory that does not exist has no checkpoints.
    """

    has_manifests = False  # set for the places of `Tiers`; elsewhere, such files are the user's

    def __init__(
        self,
        path: Path | str,
        naming: Naming | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        is_local = isinstance(path, Path)
        self.folder = LocalFolder(str(path)) if is_local else resolve_folder(path, storage_options)
        self.naming = naming or WholeFiles()
        # Locked during `prune`, and while a restore chooses a checkpoint.
        self._lock = threading.Lock()
        self._held: list[int] = []
        # File name -> the file's identity, and the entries from it that `Retention` needs.
        self._entries: dict[str, tuple[object, Mapping[str, Any]]] = {}

    def steps(self) -> list[int]:
        return sorted(self._names())

    def latest(self) -> Path | Any | None:
        names = self._names()
        return self.place_of(names[max(names)][0]) if names else None

    def path_of(self, step: int) -> Path | Any:
        """Return the path or URL that a step's checkpoint has, or would have."""
        names = self._names().get(step)
        return self.place_of(names[0] if names else self.naming.name_of(step))

    def place(self, step: int) -> tuple[Path | Any, int | None]:
        """Return the path or URL to save a step to, and the highest existing step or None."""
        names = self._names()
        name = self.naming.new_name(step, names.get(step, []))
        return self.place_of(name), max(names, default=None)

    @contextmanager
    def opened(self, step: int | None) -> Iterator[Any]:
        """Yield the open file of a step (None: the highest step).

        During the `with` block, `prune` keeps the step.  If another process removes the file before
        it is open, `opened` chooses again; once open, it stays readable.  Raises FileNotFoundError
        if there is no such checkpoint.
        """
        for n_left in reversed(range(_MAX_TRIES)):
            with ExitStack() as stack:
                name = stack.enter_context(self._held_back(step))
                try:
                    stream = stack.enter_context(self.open_file(name))
                except OSError as error:
                    if error.errno in GONE and n_left:
                        continue
                    raise
                yield stream
                return

    @contextmanager
    def held_open(self, step: int) -> Iterator[Any]:
        """Yield the open file of a step as `opened` does, but do not choose again if it is gone."""
        with self._held_back(step) as name, self.open_file(name) as stream:
            yield stream

    @contextmanager
    def _held_back(self, step: int | None) -> Iterator[str]:
        """Yield the name of a step's file; until the `with` block ends, `prune` keeps the step."""
        with self._lock:
            chosen, name = self.choose(step)
            self._held.append(chosen)
        try:
            yield name
        finally:
            with self._lock:
                self._held.remove(chosen)

    def holds(self, name: str) -> bool:
        """Return whether the file `name` exists; also True if the directory cannot be listed."""
        try:
            return name in self.folder.regular_files()
        except OSError:
            return True

    def choose(self, step: int | None) -> tuple[int, str]:
        """Return `step`, or for None the highest step, and the name of the file to restore."""
        names = self._names()
        chosen = max(names, default=None) if step is None else step
        if chosen is None or chosen not in names:
            raise self.no_checkpoint(step, sorted(names))
        return chosen, names[chosen][0]

    def open_file(self, name: str) -> AbstractContextManager[Any]:
        """Open the file `name`; for a file at a URL, return its URL instead of an open file."""
        if self.folder.is_url:
            return nullcontext(self.place_of(name))  # the reader opens its own connections
        return open(self.folder.join(name), "rb")

    def remove_step(self, step: int) -> None:
        """Remove all files of a step; raise a FileNotFoundError if there are none."""
        names = self._names()
        if step not in names:
            raise self.no_checkpoint(step, sorted(names))
        for name in names[step]:
            with suppress(FileNotFoundError):  # another process has removed it
                self.folder.remove(name)

    def prune(
        self,
        retention: Retention,
        written: int,
        spared: Callable[[], Collection[int | None]] = frozenset,
    ) -> None:
        """Remove the checkpoints that `retention` does not keep after the step `written` was saved.

        Warns of a file that cannot be read or removed (`CheckpointWarning`).  Does nothing while
        another process prunes: if both removed different checkpoints, too few would remain.
        Incomplete steps stay, and those that `spared` returns after the files were listed.
        """
        remarks: list[str] = []
        with self._lock, self.folder.locked() as alone:
            if not alone:
                return
            names = self._names()
            held = {*self._held, *spared()}  # the former are being restored

            def read(step: int, wanted: Collection[str]) -> Mapping[str, Any] | None:
                try:
                    return self._entries_of(self.naming.judged(names[step]), wanted)
                except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
                    remarks.append(
                        f"a checkpoint of step {step} cannot be read, so it stays: {error}"
                    )
                    return None

            for step in retention.spare(names, written, read):
                if step in held:
                    continue
                for name in names[step]:
                    try:
                        self.folder.remove(name)
                    except OSError as error:
                        remarks.append(f"an old checkpoint cannot be removed, so it stays: {error}")
        for remark in remarks:
            warnings.warn(remark, CheckpointWarning, stacklevel=2)

    def _entries_of(self, name: str, wanted: Collection[str]) -> Mapping[str, Any]:
        """Return the `wanted` entries of the file `name`; remember them until the file changes."""
        from ptsave.contents.archive import open as open_archive

        identity = self.folder.identity(name)
        known, entries = self._entries.get(name, (None, {}))
        if known != identity:
            place, options = self.place_of(name), self.folder.storage_options
            with open_archive(place, storage_options=options) as archive:
                entries = {key: archive[key,] for key in wanted if (key,) in archive}
            self._entries[name] = identity, entries
        return entries

    def remove_leftovers(self) -> None:
        """Remove temporary files of killed processes, and files that no checkpoint needs."""
        self.folder.remove_leftovers(self._is_own)
        with self._lock:
            files = {*self.folder.regular_files()}
            dead = {*self.naming.dead(files)}
            files -= dead
            orphans = [
                name
                for name in (files if self.has_manifests else ())
                if name.endswith(MANIFEST)
                and name.removesuffix(MANIFEST) not in files
                and self._is_own(name)
            ]
            if orphans:  # a file that has just been written is not in the first list
                files = {*self.folder.regular_files()} - dead
                orphans = [name for name in orphans if name.removesuffix(MANIFEST) not in files]
            for name in [*dead, *orphans]:
                with suppress(FileNotFoundError):  # another rank has removed it
                    self.folder.remove(name)

    def _is_own(self, name: str) -> bool:
        return self.naming.is_checkpoint(name.removesuffix(MANIFEST))

    def _names(self) -> dict[int, list[str]]:
        """Return each complete step's file names; this process reads the first of them."""
        return self.naming.checkpoints(self.folder.regular_files())

    def no_checkpoint(
        self, step: int | None, steps: list[int], others: Iterable[str] = ()
    ) -> FileNotFoundError:
        """Return the error for a `step` (None: any step) that is not among the `steps`.

        `others` has the names of files in another place of the run.
        """
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        some = ", ".join(map(str, steps[-8:]))
        there = f"only of {'..., ' if len(steps) > 8 else ''}{some}" if steps else "nor any other"
        message = f"there is {wanted}" + ("" if step is None else f", {there}")
        message += self.naming.remark([*self.folder.regular_files(), *others])
        return FileNotFoundError(errno.ENOENT, message, str(self.path))

    def place_of(self, name: str) -> Path | Any:
        """Return the path, or the URL, of the file `name` in this directory."""
        place = self.folder.file(name)
        return Path(place) if isinstance(place, str) else place.path


# -------------------------------------------------------------------------------------- names
# A step saved by several ranks is complete when the parts of all ranks exist.  The name of a part
# has a session and a number, so parts of different saves never form one checkpoint.

_WHOLE = r"step-([0-9]+)\.pt"
_PART = r"step-([0-9]+)\.([0-9a-f]{16})-([0-9]{1,9})\.rank-([0-9]{1,9})-of-([0-9]{1,9})\.pt"
_MIN_N_DIGITS = 8  # with equal digits, the order of names is that of steps


class SavedPart(NamedTuple):
    """The part of a save that a file has; `save` is "" if the file's name does not tell the save.

    A later save of a step has a greater `save`.
    """

    step: int
    save: str
    rank: int = 0
    n_ranks: int = 1


def identify(name: str) -> SavedPart | None:
    """Return the part that a file of this name has, for any number of ranks; otherwise None."""
    if match := re.fullmatch(_WHOLE, name):
        return SavedPart(int(match[1]), "")
    part = _part(name)
    if part is None or part.rank >= part.size:
        return None
    return SavedPart(part.step, f"{part.session}-{part.repeat:09}", part.rank, part.size)


class WholeFiles:
    """Names if each checkpoint is one file: ``step-<number>.pt``, perhaps with leading zeros."""

    def checkpoints(self, files: Iterable[str]) -> dict[int, list[str]]:
        """Return the files of each complete step; this process reads a step's first file."""
        names: dict[int, list[str]] = {}
        for name in files:
            if match := re.fullmatch(_WHOLE, name):
                names.setdefault(int(match[1]), []).append(name)
        for step, several in names.items():
            several.sort(key=lambda name: (name != self.name_of(step), name))
        return names

    def judged(self, names: list[str]) -> str:
        """Return the file of a step that `Retention` looks into: on all ranks the same file."""
        return names[0]

    def dead(self, files: Iterable[str]) -> list[str]:
        """Return files to remove: no checkpoint needs them, and no process is writing them."""
        return []

    def is_checkpoint(self, name: str) -> bool:
        """Return whether `name` is the name of a checkpoint, or of a part of one."""
        return re.fullmatch(_WHOLE, name) is not None

    def name_of(self, step: int) -> str:
        """Return the file name for a step that has no checkpoint."""
        return f"step-{step:0{_MIN_N_DIGITS}d}.pt"

    def new_name(self, step: int, names: list[str]) -> str:
        """Return the file name for saving a step that already has the files `names`."""
        return names[0] if names else self.name_of(step)

    def remark(self, files: Iterable[str]) -> str:
        """Return a remark on files that another number of ranks saved, or '' if there are none."""
        sizes = {part.size for part in map(_part, files) if part}
        return f" (but parts of checkpoints of {_listed(sizes)} ranks exist)" if sizes else ""


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

    `session` is text of 16 hexadecimal digits: equal on all ranks, higher than in earlier jobs.
    Methods without a docstring do the same as in `WholeFiles`.
    """

    def __init__(self, rank: int, size: int, session: str) -> None:
        self._rank, self._size, self._session = rank, size, session
        self._saves: list[tuple[int, str, int]] = []  # this process's saves, in order

    def checkpoints(self, files: Iterable[str]) -> dict[int, list[str]]:
        steps: dict[int, list[str]] = {}
        for save in sorted(self._complete(files), reverse=True):  # a step's newest save first
            names = steps.setdefault(save[0], [])
            ranks = sorted(range(self._size), key=lambda rank: rank != self._rank)
            names += [_name(save, rank, self._size) for rank in ranks]
        return steps

    def judged(self, names: list[str]) -> str:
        return self.of_rank(0, names[0])

    def dead(self, files: Iterable[str]) -> list[str]:
        """Return the parts of saves that a newer save replaces, or that can never be complete.

        The saves of a rank end in the order in which they began.  So once a later save is
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
        """For the name of any rank's part, return the name of this rank's part of the same save."""
        return self.of_rank(self._rank, name)

    def of_rank(self, rank: int, name: str) -> str:
        """For the name of any rank's part, return the name of `rank`'s part of the same save."""
        part = _part(name)
        if part is None or part.size != self._size:
            raise ValueError(f"{name!r} is not a part of a checkpoint of {self._size} ranks")
        return _name(part.save, rank, self._size)

    def save_of(self, name: str) -> str:
        """For a part's name, return the beginning that all names of parts of its save share."""
        return name.partition(".rank-")[0]

    def remark(self, files: Iterable[str]) -> str:
        files = list(files)
        sizes = {part.size for part in map(_part, files) if part} - {self._size}
        if sizes:
            return f" (but parts of checkpoints of {_listed(sizes)} ranks, not {self._size}, exist)"
        if WholeFiles().checkpoints(files):
            return " (but checkpoints of one rank exist)"
        return ""


class PartsOfHosts(Parts):
    """Names of parts in a directory that only the ranks of one host share.

    A host does not see the parts of the others.  So only the saves in `known` are complete: all
    ranks have reported that they have their parts.
    """

    def __init__(self, rank: int, size: int, session: str) -> None:
        super().__init__(rank, size, session)
        self.known: set[tuple[int, str, int]] = set()

    def checkpoints(self, files: Iterable[str]) -> dict[int, list[str]]:
        steps: dict[int, list[str]] = {}
        for name in sorted(files):
            if (part := _part(name)) and part.size == self._size and part.save in self.known:
                steps.setdefault(part.step, []).append(name)
        return steps

    def note_complete(self, keys: Iterable[tuple[int, str]]) -> None:
        """Add saves to `known`; a key has the step and the text from `identify`."""
        for step, save in keys:
            session, _, repeat = save.partition("-")
            self.known.add((step, session, int(repeat)))

    def save_id(self, name: str) -> tuple[int, str, int]:
        """Return the save of a part: its step, session and number."""
        part = _part(name)
        assert part is not None
        return part.save

    def in_shared_directory(self) -> Parts:
        """Return the names of the same saves in a directory that all ranks share."""
        shared = Parts(self._rank, self._size, self._session)
        shared._saves = self._saves
        return shared

    def _complete(self, files: Iterable[str]) -> set[tuple[int, str, int]]:
        return self.known


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


# -------------------------------------------------------------------- the checkpoints that stay
# The metric is stored in the checkpoint's own file.  So a process that continues the run makes the
# same choice of checkpoints to keep.

# Returns a step's entries with these names, as far as they exist; None if they cannot be read.
ReadEntries = Callable[[int, Collection[str]], "Mapping[str, Any] | None"]


class Retention(NamedTuple):
    """The rules that decide which checkpoints stay; for the fields, see `AsyncCheckpointer`."""

    keep: int | None = 3
    keep_every: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    keep_marked: str | None = None

    def check_rules(self) -> None:
        """Raise ValueError or TypeError for rules that are invalid, or contradict each other."""
        for name in ("keep_every", "keep_best", "keep_marked"):
            if self.keep is None and getattr(self, name) is not None:
                raise ValueError(f"keep=None keeps all checkpoints: leave {name} out, or set keep")
        if (self.keep_best is None) != (self.metric is None):
            raise TypeError("keep_best and metric go together: keep_best=2, metric='val_loss'")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {self.mode!r}")
        for name, entry in (("metric", self.metric), ("keep_marked", self.keep_marked)):
            if not isinstance(entry, (str, type(None))):
                raise TypeError(f"{name} must be the name of an entry, not {entry!r}")

    def check(self, entries: Mapping[str, Any]) -> None:
        """Raise a TypeError if these entries have the metric, but it is not a number."""
        if self.metric is None or self.metric not in entries:
            return
        value = entries[self.metric]
        if _number(value) is None:
            kind = type(value).__name__
            raise TypeError(f"the metric {self.metric!r} must be a number, not of type {kind}")

    def spare(self, steps: Iterable[int], written: int, read: ReadEntries) -> list[int]:
        """Return the steps whose checkpoints need not stay after the step `written` was saved.

        The written step and the highest step stay.  They differ if training went back to an earlier
        step; then each is the newest of one run.  A checkpoint also stays if the rules need its
        entries, but the entries cannot be read.
        """
        if self.keep is None:
            return []
        steps = sorted(steps)
        newest = {written, max(steps, default=written)}
        older = [step for step in steps if step not in newest]
        spare = older[: max(len(steps) - self.keep, 0)]
        if self.keep_every is not None:
            spare = [step for step in spare if step % self.keep_every]
        wanted = [name for name in (self.metric, self.keep_marked) if name is not None]
        if not (spare and wanted):
            return spare
        entries = {step: read(step, wanted) for step in steps}
        best = self._best(entries)
        return [
            step
            for step in spare
            if (values := entries[step]) is not None
            and step not in best
            and not (self.keep_marked is not None and _is_true(values.get(self.keep_marked)))
        ]

    def _best(self, entries: Mapping[int, Mapping[str, Any] | None]) -> set[int]:
        """Return the `keep_best` steps with the best metrics; of equal ones, the higher steps."""
        if self.metric is None:
            return set()
        sign = 1 if self.mode == "min" else -1
        values = {step: _number((found or {}).get(self.metric)) for step, found in entries.items()}
        ranked = sorted(
            (sign * value, -step)
            for step, value in values.items()
            if value is not None and not math.isnan(value)
        )
        return {-step for _, step in ranked[: self.keep_best]}


def _number(value: Any) -> float | None:
    """Return a number, or the one number in a tensor or array, as a float; otherwise None.

    Accepts only types that can be loaded from a checkpoint without running code from it.
    """
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if type(value) in (bool, int, float) else None
    except OverflowError:  # the int is too large for a float
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_true(value: Any) -> bool:
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several values
        return True
