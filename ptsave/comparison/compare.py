"""`compare`: the differences of two checkpoints."""

from __future__ import annotations

import errno
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pickle import UnpicklingError
from typing import Any

from torch import Tensor

from ptsave.comparison.directories import pairs_in
from ptsave.comparison.entries import Detail, EntryComparer, EntryDifference, TensorPair
from ptsave.comparison.moved_names import moved_names
from ptsave.comparison.numbers import Tolerance, checked_tolerance
from ptsave.comparison.sides import ComparedCheckpoint, flat
from ptsave.comparison.tensors import NumberMeasure, are_empty, compare_tensors
from ptsave.contents.captures import is_capture
from ptsave.contents.checkpoint_files import look_into, named_checkpoints
from ptsave.contents.contents import Contents
from ptsave.contents.opening import open_contents, open_files
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.local import describe, position_kept
from ptsave.sources.opening import Folder, folder_at
from ptsave.support.calls import pausing_garbage_collection, progress_bar
from ptsave.tree.containers import is_container, walk
from ptsave.tree.names import entry_not_found

_MAX_LISTED = 3


class _Shown(str):
    """A word for a file, which is shown where the values of entries are shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_FILE, _OTHER_FILE = _Shown("a file"), _Shown("other bytes")


@dataclass
class Comparison:
    """The differences of two checkpoints.

    Attributes
    ----------
    differences : list of EntryDifference
        Everything that makes them different.
    within_tolerance : list of EntryDifference
        Tensors whose values differ by no more than the tolerance.
    not_compared : dict of str to str
        Names of files that could not be compared, or have no counterpart, and why.
    remarks : list of str
        Differences that do not count, and entries that were not compared.
    n_tensors : int
        Number of pairs of tensors whose values were compared.
    nbytes : int
        Bytes of these tensors in a.
    """

    differences: list[EntryDifference] = field(default_factory=list)
    within_tolerance: list[EntryDifference] = field(default_factory=list)
    not_compared: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    n_tensors: int = 0
    nbytes: int = 0

    @property
    def equal(self) -> bool:
        """Whether everything was compared, and there are no differences."""
        return not self.differences and not self.not_compared


def compare(
    a: Any,
    b: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    detail: Detail = "values",
    ignore_dtype: bool = False,
    patterns: Sequence[str] = (),
    progress: bool = False,
    a_storage_options: Mapping[str, Any] | None = None,
    b_storage_options: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare two checkpoints: their entries, types, dtypes, shapes and values.

    Two tensors are equal if they have the same bytes, element by element.  So 0.0 and -0.0 differ,
    and two NaNs of other bits differ, though by 0.  With `rtol` or `atol` values count instead: 0.0
    equals -0.0, and NaN equals any NaN.  Strides, devices, ``requires_grad`` and the order of dicts
    are not compared.  Shared memory that differs gives only a remark.

    Parameters
    ----------
    a, b : str, os.PathLike or file-like
        As for :func:`ptsave.open`.  If one of them is a safetensors file, or several files,
        only tensors are compared, by their dotted names.  Two directories are compared file by
        file.  The model of one is compared with the model of the other, however they are split,
        other checkpoints by name or step, and all other files byte by byte.
    rtol, atol : float, optional
        Numbers are equal if ``abs(a - b) <= atol + rtol * abs(b)``, as for
        :func:`torch.testing.assert_close`.  If only one is given, the other is 0.
    detail : {"values", "shapes", "names"}, default "values"
        Depth of the comparison: ``"shapes"`` leaves out values, ``"names"`` also dtypes and shapes.
        Both read only the directories of the files.
    ignore_dtype : bool, default False
        Whether tensors of two dtypes are compared by their values, in float64.
    patterns : sequence of str
        Only entries whose dotted names match one of these are compared (:mod:`fnmatch`).
    progress : bool, default False
        Whether to show a progress bar.
    a_storage_options, b_storage_options : mapping, optional
        For the file systems of URLs, of a and of b.

    Returns
    -------
    Comparison

    Raises
    ------
    ValueError
        If a tolerance is negative or NaN, or names are ambiguous.  Also for a tensor whose elements
        share memory, if comparing them takes over 1 GiB and over 8 times the bytes of its storages.
    EntryNotFoundError
        If no entry matches `patterns`; a KeyError.
    TypeError
        If values are of a kind that cannot be compared.
    OSError, CorruptCheckpointError, pickle.UnpicklingError
        As :func:`ptsave.open`.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = [os.path.join(folder, name) for name in ("a.pt", "b.pt")]
    ...     ptsave.save({"weight": torch.tensor([1.0, 2.0]), "step": 7}, paths[0])
    ...     ptsave.save({"weight": torch.tensor([1.0, 2.5]), "step": 7}, paths[1])
    ...     found = compare(*paths)
    >>> [(each.kind, each.name, each.numbers.max_abs) for each in found.differences]
    [('numbers', 'weight', 0.5)]
    """
    wanted = _Wanted(patterns)
    settings = _Settings(wanted, detail, ignore_dtype, checked_tolerance(rtol, atol), progress)
    with position_kept(a), position_kept(b):
        folders = folder_at(a, a_storage_options), folder_at(b, b_storage_options)
        if folders[0] is not None and folders[1] is not None:
            result = _compare_directories(folders[0], folders[1], settings)
        else:
            first = second = open_contents(a, a_storage_options)
            # A file object that is both sides has one position, so it is opened once.
            if b is not a or b_storage_options != a_storage_options:
                second = open_contents(b, b_storage_options)
            result = _compare_contents(first, second, settings)
            for folder in folders:
                if folder is not None:
                    _note_others(folder, result)
    wanted.require_any(describe(a), describe(b))
    return result


@dataclass(frozen=True)
class _Settings:
    """The options of a comparison."""

    wanted: _Wanted
    detail: Detail
    ignore_dtype: bool
    tolerance: Tolerance | None
    progress: bool


def _compare_directories(a: Folder, b: Folder, settings: _Settings) -> Comparison:
    """Compare everything in two directories; files that are no checkpoints by their bytes."""
    found = pairs_in(a, b)
    for folder, others in ((a, found.only_in_a), (b, found.only_in_b)):
        if not (found.pairs or found.problems or others):
            raise FileNotFoundError(errno.ENOENT, "no file in this directory", folder.path)
    result = Comparison(not_compared=dict.fromkeys(found.problems, "damaged or missing"))
    for pair in found.pairs:
        if pair.are_checkpoints:
            try:
                contents = open_files(pair.a), open_files(pair.b)
            except (UnpicklingError, UnsupportedSourceError) as error:
                if not pair.same_bytes():
                    result.not_compared[pair.name] = str(error).partition("\n")[0]
                continue
            _add(result, pair.name, _compare_contents(*contents, settings))
        elif settings.wanted.takes_all and not pair.same_bytes():
            result.differences.append(EntryDifference("value", pair.name, _FILE, _OTHER_FILE))
    if settings.wanted.takes_all:
        for name in found.only_in_a:
            result.differences.append(EntryDifference("only in a", name, a=_FILE, top=name))
        for name in found.only_in_b:
            result.differences.append(EntryDifference("only in b", name, b=_FILE, top=name))
    return result


def _add(result: Comparison, file: str, found: Comparison) -> None:
    """Add the result for one file of a directory; its name precedes the names of its entries."""
    prefix = f"{file}/" if file and not file.endswith("/") else file

    def named(differences: list[EntryDifference]) -> list[EntryDifference]:
        return [
            replace(
                each,
                name=prefix + each.name if each.name else file,
                top=prefix + each.top if each.top else file,
                moved=None if each.moved is None else prefix + each.moved,
            )
            for each in differences
        ]

    result.differences += named(found.differences)
    result.within_tolerance += named(found.within_tolerance)
    result.remarks += found.remarks
    result.n_tensors += found.n_tensors
    result.nbytes += found.nbytes


def _note_others(folder: Folder, result: Comparison) -> None:
    """Name the checkpoints of a directory beside the model that was compared with one file."""
    named = named_checkpoints(folder, look_into(folder, distributed=True))
    if "" in named:  # otherwise they are steps, and the newest was compared
        reason = "the other side is one file"
        result.not_compared = {name: reason for name in named if name}


def _compare_contents(first: Contents, second: Contents, settings: _Settings) -> Comparison:
    sources = ComparedCheckpoint(first), ComparedCheckpoint(second)
    result = Comparison()
    if is_capture(sources[0].obj) and is_capture(sources[1].obj):
        result.remarks.append(
            "both are captures, compared as checkpoints here: `ptsave diff --capture`, or "
            "compare_captures(), aligns their calls"
        )
    objects = _objects(sources, result)
    comparer = EntryComparer(
        wanted=settings.wanted,
        detail=settings.detail,
        ignore_dtype=settings.ignore_dtype,
        ignore_types=sources[0].is_flat or sources[1].is_flat,
        tolerance=settings.tolerance,
    )
    with pausing_garbage_collection():
        comparer.compare(*objects)
    result.differences = _with_moved(comparer.differences)
    _compare_values(sources, comparer.pairs, settings.tolerance, result, settings.progress)
    with pausing_garbage_collection():
        result.remarks += _remarks_on_sharing(sources, comparer.pairs)
    return result


class _Wanted:
    """Matches names with patterns, and keeps the names that do not match until one matches."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns
        self._others: list[str] = []
        self._found = not patterns

    @property
    def takes_all(self) -> bool:
        return not self._patterns

    def __call__(self, name: str) -> bool:
        if not self._patterns:
            return True
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
            self._found = True
            self._others.clear()
            return True
        if not self._found:
            self._others.append(name)
        return False

    def require_any(self, *paths: str) -> None:
        """Raise EntryNotFoundError if no name has matched."""
        if self._found:
            return
        files = " and ".join(dict.fromkeys(paths))
        raise entry_not_found(files, self._patterns[0], dict.fromkeys(self._others))


def _objects(
    sources: tuple[ComparedCheckpoint, ComparedCheckpoint], result: Comparison
) -> tuple[Any, Any]:
    """Return the objects to compare, or only their tensors where one side has nothing else."""
    if not any(source.is_flat for source in sources):
        return sources[0].obj, sources[1].obj
    for source in sources:
        if not source.is_flat and _holds_more(source.obj):
            result.remarks.append(
                f"{source.path} holds more than tensors; only those are compared, as the other "
                "one holds nothing else"
            )
    return flat(sources[0].obj, sources[0].path), flat(sources[1].obj, sources[1].path)


def _holds_more(obj: Any) -> bool:
    """Whether an object holds anything, at any depth, that is no tensor."""
    leaves = (value for value in walk(obj, attributes=False) if not is_container(value))
    return any(not isinstance(value, Tensor) for value in leaves)


def _compare_values(
    sources: tuple[ComparedCheckpoint, ComparedCheckpoint],
    pairs: list[TensorPair],
    tolerance: Tolerance | None,
    result: Comparison,
    progress: bool,
) -> None:
    result.n_tensors = len(pairs)
    result.nbytes = sum(pair.a.numel() * pair.a.itemsize for pair in pairs)
    n_done = 0
    with progress_bar(progress, "comparing", result.nbytes, delay=1) as callback:

        def done(nbytes: int) -> None:
            nonlocal n_done
            n_done += nbytes
            if callback is not None:
                callback(n_done)

        compared = [pair for pair in pairs if not are_empty(pair)]
        for pair, numbers in compare_tensors(*sources, compared, NumberMeasure(tolerance), done):
            if numbers.n_different:
                differs = result.differences if numbers.n_outside else result.within_tolerance
                found = EntryDifference("numbers", pair.name, pair.a, pair.b, numbers=numbers)
                differs.append(found)


def _with_moved(differences: list[EntryDifference]) -> list[EntryDifference]:
    """Add the likely names on the other side to entries that only one side has."""
    alone: dict[str, dict[str, Any]] = {"only in a": {}, "only in b": {}}
    for each in differences:
        value = each.a if each.kind == "only in a" else each.b
        if each.kind in alone and isinstance(value, Tensor):
            alone[each.kind][each.name] = (value.dtype, value.shape)
    moved = moved_names(alone["only in a"], alone["only in b"])
    names = {"only in a": moved, "only in b": {b: a for a, b in moved.items()}}
    return [
        replace(each, moved=names[each.kind].get(each.name)) if each.kind in names else each
        for each in differences
    ]


def _remarks_on_sharing(
    sources: tuple[ComparedCheckpoint, ComparedCheckpoint], pairs: list[TensorPair]
) -> list[str]:
    """Return a remark for each side with tensors that share memory only there."""
    of_a = _sharing(sources[0], pairs, [pair.a for pair in pairs])
    of_b = _sharing(sources[1], pairs, [pair.b for pair in pairs])
    remarks = []
    for groups, others, source in ((of_a, of_b, sources[0]), (of_b, of_a, sources[1])):
        alone = [names for names in groups if names not in others]
        if alone:
            listed = "; ".join(", ".join(names) for names in alone[:_MAX_LISTED])
            more = f"; and {len(alone) - _MAX_LISTED} more" if len(alone) > _MAX_LISTED else ""
            remarks.append(f"only in {source.path} these share memory: {listed}{more}")
    return remarks


def _sharing(
    source: ComparedCheckpoint, pairs: list[TensorPair], tensors: list[Tensor]
) -> dict[tuple[str, ...], None]:
    """Return the groups of compared tensors that share a storage, by their names."""
    groups: dict[object, list[str]] = {}
    for pair, place in zip(pairs, source.places_of(tensors), strict=True):
        groups.setdefault(place, []).append(pair.name)
    return {tuple(names): None for names in groups.values() if len(names) > 1}
