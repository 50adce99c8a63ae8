"""`compare`: finds the differences between two checkpoints."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from pickle import UnpicklingError
from typing import Any

from torch import Tensor

from ptsave import _core
from ptsave.comparison.entries import (
    Detail,
    EntryComparer,
    EntryDifference,
    Settings,
    Wanted,
    moved_names,
)
from ptsave.comparison.tensors import (
    ComparedCheckpoint,
    NumberMeasure,
    TensorPair,
    are_empty,
    checked_tolerance,
    compare_tensors,
    flat,
    opened_sides,
)
from ptsave.contents.captures import is_capture
from ptsave.contents.contents import Contents
from ptsave.contents.directories import CheckpointFiles, look_into, named_checkpoints
from ptsave.contents.files import ShardFiles
from ptsave.contents.opening import open_files
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.locations import describe, position_kept
from ptsave.sources.ranges import Folder, folder_at, open_folder_or_file
from ptsave.support.calls import pausing_garbage_collection, progress_bar
from ptsave.tree.containers import is_container, walk

_MAX_LISTED = 3
_CHUNK_NBYTES = 1 << 20


class _Shown(str):
    """A text to show in place of an entry's value; shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_FILE, _OTHER_FILE = _Shown("a file"), _Shown("other bytes")


@dataclass
class Comparison:
    """The differences between two checkpoints.

    Attributes
    ----------
    differences : list of EntryDifference
        All differences, except those of numbers that are within the tolerance.
    within_tolerance : list of EntryDifference
        Tensors whose values differ, but not by more than the tolerance.
    not_compared : dict of str to str
        Names of files that were not compared, and the reasons.
    remarks : list of str
        Texts about differences that are not in `differences`, and about entries not compared.
    n_tensors : int
        Number of pairs of tensors whose values were compared.
    nbytes : int
        Bytes of the compared tensors in checkpoint a.
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

    Two tensors are equal if each element has the same bytes in both.  So 0.0 and -0.0 differ, and
    two NaNs with different bits differ; such differences have the size 0.  With `rtol` or
    `atol`, the values are compared: 0.0 equals -0.0, and NaN equals any NaN.  Strides, devices,
    ``requires_grad`` and the order of dicts are not compared.  If tensors share memory in only one
    checkpoint, the result has a remark about them, but no difference.

    Parameters
    ----------
    a, b : str, os.PathLike or file-like
        The checkpoints, as for :func:`ptsave.open`.  If one of them is a safetensors file, or has
        several files, only tensors are compared, by their dotted names.  If both are directories,
        their models are compared, even if the shards differ.  The directories' other checkpoints
        are compared if their names or steps are equal, and other files byte by byte.
    rtol, atol : float, optional
        Numbers are equal if ``abs(a - b) <= atol + rtol * abs(b)``, as for
        :func:`torch.testing.assert_close`.  If only one tolerance is given, the other is 0.
    detail : {"values", "shapes", "names"}, default "values"
        ``"shapes"`` compares no values; ``"names"`` compares no values, dtypes or shapes.  With
        both, the values of tensors are not read.
    ignore_dtype : bool, default False
        Whether tensors with different dtypes are compared by their values, in float64.
    patterns : sequence of str
        Compares only entries whose dotted names match a pattern (:mod:`fnmatch`); default: all.
    progress : bool, default False
        Whether to show a progress bar.
    a_storage_options, b_storage_options : mapping, optional
        Options for the file systems of a and b, if these are URLs.

    Returns
    -------
    Comparison

    Raises
    ------
    ValueError
        If a tolerance is negative or NaN, if two tensors have the same dotted name, or if an
        expanded tensor needs more than 1 GiB, and more than 8 times the bytes of its storage.
    EntryNotFoundError
        If no entry matches `patterns`.  The error is a KeyError, too.
    TypeError
        If two values have types that cannot be compared.
    OSError, CorruptCheckpointError, pickle.UnpicklingError
        If :func:`ptsave.open` raises such an error.

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
    wanted = Wanted(patterns)
    settings = Settings(wanted, detail, ignore_dtype, checked_tolerance(rtol, atol), progress)
    with position_kept(a), position_kept(b):
        folders = folder_at(a, a_storage_options), folder_at(b, b_storage_options)
        if folders[0] is not None and folders[1] is not None:
            result = _compare_directories(folders[0], folders[1], settings)
        else:
            sides = opened_sides(a, b, a_storage_options, b_storage_options)
            result = _compare_contents(*sides, settings)
            for folder in folders:
                if folder is not None:
                    _note_others(folder, result)
    wanted.require_any(describe(a), describe(b))
    return result


def _compare_directories(a: Folder, b: Folder, settings: Settings) -> Comparison:
    """Compare files with equal names in two directories: checkpoints by entry, others by byte."""
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
    """Add `found`, the result for `file`, to `result`; names of entries get `file/` in front."""
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
    """Note a folder's other checkpoints as not compared, because the other side is one file."""
    named = named_checkpoints(folder, look_into(folder, distributed=True))
    if "" in named:  # if not, all are steps, and the newest one was compared
        reason = "the other side is one file"
        result.not_compared = {name: reason for name in named if name}


def _compare_contents(first: Contents, second: Contents, settings: Settings) -> Comparison:
    sources = ComparedCheckpoint(first), ComparedCheckpoint(second)
    result = Comparison()
    if is_capture(sources[0].obj) and is_capture(sources[1].obj):
        result.remarks.append(
            "both files are captures, but were compared as checkpoints; to align their calls, use "
            "`ptsave diff --capture` or compare_captures()"
        )
    objects = _objects(sources, result)
    is_flat = sources[0].is_flat or sources[1].is_flat
    comparer = EntryComparer(settings, ignore_types=is_flat)
    with pausing_garbage_collection():
        comparer.compare(*objects)
    result.differences = _with_moved(comparer.differences)
    _compare_values(sources, comparer.pairs, settings, result)
    with pausing_garbage_collection():
        result.remarks += _remarks_on_sharing(sources, comparer.pairs)
    return result


def _objects(
    sources: tuple[ComparedCheckpoint, ComparedCheckpoint], result: Comparison
) -> tuple[Any, Any]:
    """Return the two objects to compare; if one side can hold only tensors, their tensors."""
    if not any(source.is_flat for source in sources):
        return sources[0].obj, sources[1].obj
    for source in sources:
        if source.is_flat:
            continue
        leaves = filterfalse(is_container, walk(source.obj, attributes=False))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            result.remarks.append(
                f"{source.path} holds more than tensors: only its tensors are compared, because "
                "the other checkpoint holds only tensors"
            )
    return flat(sources[0].obj, sources[0].path), flat(sources[1].obj, sources[1].path)


def _compare_values(
    sources: tuple[ComparedCheckpoint, ComparedCheckpoint],
    pairs: list[TensorPair],
    settings: Settings,
    result: Comparison,
) -> None:
    result.n_tensors = len(pairs)
    result.nbytes = sum(pair.a.numel() * pair.a.itemsize for pair in pairs)
    with progress_bar(settings.progress, "comparing", result.nbytes, delay=1) as callback:
        compared = [pair for pair in pairs if not are_empty(pair)]
        measure = NumberMeasure(settings.tolerance)
        for pair, numbers in compare_tensors(*sources, compared, measure, callback):
            if numbers.n_different:
                differs = result.differences if numbers.n_outside else result.within_tolerance
                found = EntryDifference("numbers", pair.name, pair.a, pair.b, numbers=numbers)
                differs.append(found)


def _with_moved(differences: list[EntryDifference]) -> list[EntryDifference]:
    """To each tensor that only one side has, add its likely new name on the other side."""
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
    """Return remarks on tensors that share memory in only one of the two checkpoints."""
    of_a = _sharing(sources[0], pairs, [pair.a for pair in pairs])
    of_b = _sharing(sources[1], pairs, [pair.b for pair in pairs])
    remarks = []
    for groups, others, source in ((of_a, of_b, sources[0]), (of_b, of_a, sources[1])):
        alone = [names for names in groups if names not in others]
        if alone:
            listed = "; ".join(", ".join(names) for names in alone[:_MAX_LISTED])
            more = f"; and {len(alone) - _MAX_LISTED} more" if len(alone) > _MAX_LISTED else ""
            remarks.append(f"only in {source.path}, these tensors share memory: {listed}{more}")
    return remarks


def _sharing(
    source: ComparedCheckpoint, pairs: list[TensorPair], tensors: list[Tensor]
) -> dict[tuple[str, ...], None]:
    """Return a tuple of names for each storage that two or more compared tensors share."""
    groups: dict[object, list[str]] = {}
    for pair, place in zip(pairs, source.places_of(tensors), strict=True):
        groups.setdefault(place, []).append(pair.name)
    return {tuple(names): None for names in groups.values() if len(names) > 1}


# ------------------------------------------------------------------------------------- directories


@dataclass(frozen=True)
class FilePair:
    """Two checkpoints, or two other files, with the same name."""

    name: str  # relative to the directory; "" for its model, or its only checkpoint
    a: ShardFiles
    b: ShardFiles
    are_checkpoints: bool

    def same_bytes(self) -> bool:
        """Whether both are single files with the same bytes."""
        paths = self.a.paths, self.b.paths
        if len(paths[0]) != 1 or len(paths[1]) != 1:
            return False
        with closing(self.a.open_one(paths[0][0])) as a, closing(self.b.open_one(paths[1][0])) as b:
            if a.nbytes != b.nbytes:
                return False
            with a.stream() as one, b.stream() as other:
                while piece := one.read(_CHUNK_NBYTES):
                    if piece != other.read(len(piece)):
                        return False
        return True


@dataclass
class FilePairs:
    """The pairs of files with the same name in both directories, and names that only one has."""

    pairs: list[FilePair] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # damaged or missing files


def pairs_in(a: Folder, b: Folder, prefix: str = "") -> FilePairs:
    """Pair files of two directories, also in subdirectories; put `prefix` before each name."""
    sides = look_into(a, distributed=True), look_into(b, distributed=True)
    checkpoints = named_checkpoints(a, sides[0]), named_checkpoints(b, sides[1])
    files = _others_in(a, sides[0]) | checkpoints[0], _others_in(b, sides[1]) | checkpoints[1]
    found = FilePairs(problems=[*sides[0].problems, *sides[1].problems])
    for name in files[0].keys() & files[1].keys():
        are_checkpoints = name in checkpoints[0] and name in checkpoints[1]
        found.pairs.append(FilePair(prefix + name, files[0][name], files[1][name], are_checkpoints))
    found.pairs.sort(key=lambda pair: pair.name)
    names = {*files[0], *sides[0].directories}, {*files[1], *sides[1].directories}
    found.only_in_a = [prefix + name for name in sorted(names[0] - names[1])]
    found.only_in_b = [prefix + name for name in sorted(names[1] - names[0])]
    for name in sides[0].directories:
        if name in sides[1].directories:
            inner = pairs_in(_folder_in(a, name), _folder_in(b, name), f"{prefix}{name}/")
            for kind, values in vars(inner).items():
                getattr(found, kind).extend(values)
    return found


def _others_in(folder: Folder, found: CheckpointFiles) -> dict[str, ShardFiles]:
    """Return a folder's files by name, except checkpoints and temporary files of saves."""
    return {
        name: ShardFiles([folder.join(name)], storage_options=folder.storage_options)
        for name in found.ignored
        if not _core.target_of_temporary(os.fsencode(name))
    }


def _folder_in(folder: Folder, name: str) -> Folder:
    found = open_folder_or_file(folder.join(name), folder.storage_options)
    assert isinstance(found, Folder)
    return found
