"""Verifies files: makes all checks that the format allows, and names the damaged tensors."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pickle import UnpicklingError
from typing import Any, NamedTuple

from ptsave.archive.damage import entries_with_records, find_damage
from ptsave.archive.opening import open_source_archive, spans_of
from ptsave.archive.reader import RecordReader
from ptsave.archive.recovery import CutArchive, Recovery
from ptsave.archive.unpickling import can_defer_reading
from ptsave.contents.contents import UnreadContents
from ptsave.contents.directories import CheckpointFiles, checkpoint_files
from ptsave.contents.files import is_metadata, refuse_file_of_rank, require_files_beside
from ptsave.contents.opening import open_file, reporting_damage, require_saved_object
from ptsave.contents.opening import recover as recovery_of
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.errors import CorruptCheckpointError, NotCheckpointError, bare_message
from ptsave.inspection.pickle_globals import globals_in_pickle
from ptsave.inspection.reports import NO_CHECKSUMS, Problem, Verification, compare_with_index
from ptsave.sources.locations import position_kept
from ptsave.sources.ranges import FsspecFile, RangeSource
from ptsave.support.calls import ProgressCallback, progress_from
from ptsave.support.text import count_text, some_of
from ptsave.support.torch_names import restricted_unpickler
from ptsave.tree.containers import MAX_DEPTH
from ptsave.tree.tree import EntryTree

_METADATA_UNCHECKED = (
    "the metadata has no checksum, because torch's writer adds none: a changed name or number that "
    "is still valid would go unnoticed"
)
_UNKNOWN_TENSORS = (
    "the tensors cannot be named, because the object can be built only with weights_only=False, or "
    "only from values that are damaged"
)
_TOO_DEEP = (
    f"containers are nested deeper than {MAX_DEPTH} levels: deeper tensors were verified, but "
    "are not named"
)
_WITHOUT_CHECKSUMS = (
    "the storages have no checksums (set_crc32_options(False) or skip_data()): they were read, but "
    "not compared"
)


def verify_all(
    contents: CheckpointFiles, progress: ProgressCallback | None
) -> tuple[list[Verification], list[Problem]]:
    """Verify each file of a directory; also return the problems of the directory itself."""
    problems = [Problem(text) for text in contents.problems]
    verified: list[Verification] = []
    done = 0
    for files in contents.sets:
        shards = []
        for source in files.open():
            shards.append(_verify_source(source, progress_from(progress, done)))
            done += shards[-1].nbytes
        verified += shards
        problems += compare_with_index(files, shards)
    return verified, problems


def verify_file(
    f: Any,
    progress: ProgressCallback | None = None,
    *,
    recover: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Verification:
    """Check all checksums of a file, and whether all positions of records and tensors are possible.

    In a directory, checks all checkpoints, except in subdirectories.  With `recover`, a file whose
    end is missing counts as undamaged if :func:`ptsave.open` can recover all complete records.
    Raises OSError if there is no checkpoint.
    """
    with position_kept(f):
        contents = checkpoint_files(f, storage_options)
        if len(contents.sets) == 1 and contents.sets[0].source is not None:
            return _verify_source(contents.sets[0].source, progress, recover=recover)
        return _as_one(contents.path, *verify_all(contents, progress))


def _as_one(path: str, files: list[Verification], problems: list[Problem]) -> Verification:
    """Merge the results of several files into one `Verification`."""
    for file in files:
        problems += [replace(each, reason=f"{file.path}: {each.reason}") for each in file.problems]
    return Verification(
        path,
        problems,
        [f"{file.path}: {remark}" for file in files for remark in file.remarks],
        sum(file.n_records for file in files),
        sum(file.nbytes for file in files),
        [name for file in files for name in file.tensors or []],
        [name for file in files for name in file.whole or []],
        all(file.has_checksums for file in files),
    )


def _verify_source(
    source: RangeSource, progress: ProgressCallback | None, *, recover: bool = False
) -> Verification:
    refuse_file_of_rank(source)
    recovery = recovery_of(source) if recover else None
    if recovery is not None:
        return _verify_recovery(source, recovery, progress)
    if is_metadata(source):
        require_files_beside(source)
        source.close()
        return _verify_ranks(source if isinstance(source, FsspecFile) else source.name, progress)
    if source.kind != "zip":
        return _verify_other(source, progress)
    try:
        reader = open_source_archive(source, verify=True)
    except CorruptCheckpointError as error:
        if isinstance(source, FsspecFile):  # all of the file would have to be fetched
            return Verification(source.name, [_problem_of(error)], nbytes=source.nbytes)
        return _verify_without_directory(source, error)
    return _verify_archive(source, reader, progress)


def _verify_recovery(
    source: RangeSource, recovery: Recovery, progress: ProgressCallback | None
) -> Verification:
    found = _verify_source(recovery.source, progress)
    damage = []
    if reason := recovery.damage():
        first = next(iter([*recovery.storages, *recovery.journals]), None)
        damage.append(Problem(reason, first, entries=[*recovery.entries]))
    remark = "the file has no end: only its finished part was checked"
    return replace(
        found,
        problems=[*damage, *found.problems],
        remarks=[*found.remarks, remark],
        n_records=recovery.n_records,
        nbytes=source.nbytes,
        is_unfinished=True,
        tensors=None if found.tensors is None else [*found.tensors, *recovery.entries],
    )


def _verify_other(source: RangeSource, progress: ProgressCallback | None) -> Verification:
    """Verify a file that is not an archive: open it, because this checks its structure."""
    path, nbytes = source.name, source.nbytes
    try:
        contents = open_file(source)
        if isinstance(contents, SafetensorsContents) and not contents.has_crcs:
            contents = SafetensorsContents(source)  # compares, also with PTSAVE_VERIFY=0
    except NotCheckpointError:
        if not (path.endswith(".safetensors") and source.head[8:9] == b"{"):
            raise
        cut = Problem(f"the file is cut short: it ends within its header, after {nbytes} bytes")
        return Verification(path, [cut], nbytes=nbytes)
    except CorruptCheckpointError as error:
        return Verification(path, [_problem_of(error)], nbytes=nbytes)
    kind = contents.kind
    tree = EntryTree(contents.obj)
    names = _names_in(tree)
    if isinstance(contents, SafetensorsContents) and contents.has_crcs:
        damage = contents.find_damage(progress)
        problems = [
            Problem("the checksum in the header does not match", None, each.offset, [each.name])
            for each in damage
        ]
        whole = [name for name in names if name not in {each.name for each in damage}]
        return Verification(path, problems, [], 0, nbytes, names, whole)
    remark = (
        NO_CHECKSUMS
        if kind == "safetensors"
        else f"a file of kind {kind} has no checksums, but it can be loaded"
    )
    remarks = [remark] if tree.is_whole else [remark, _TOO_DEEP]
    return Verification(path, [], remarks, 0, nbytes, names, names, has_checksums=False)


def _verify_ranks(metadata: str | FsspecFile, progress: ProgressCallback | None) -> Verification:
    """Check all files and checksums of the distributed checkpoint with this ``.metadata`` file."""
    # Imported here, because ptsave.dcp.checkpoint imports a slow module of torch.
    from ptsave.dcp.checkpoint import DcpCheckpoint, find_dcp_damage

    metadata_path = metadata if isinstance(metadata, str) else metadata.name
    path = os.path.dirname(metadata_path) or "."
    try:
        checkpoint = DcpCheckpoint(metadata)
    except CorruptCheckpointError as error:
        reason = str(error).removeprefix(f"{metadata_path}: ")
        problem = Problem(f"{os.path.basename(metadata_path)}: {reason}", None, None, error.entries)
        nbytes = metadata.nbytes if isinstance(metadata, FsspecFile) else os.stat(metadata).st_size
        return Verification(path, [problem], nbytes=nbytes)
    found = find_dcp_damage(checkpoint, progress)
    lost = {name for damage in found.damage for name in damage.entries}
    names = [*checkpoint.tensors]
    remarks = []
    if not found.metadata_is_checked:
        remarks.append(_METADATA_UNCHECKED)
    if found.unverified:
        what = count_text(len(found.unverified), "item")
        remarks.append(
            f"not verified, because checksums are missing: {what}, {some_of(found.unverified, 3)}"
        )
    return Verification(
        path,
        [
            Problem(
                f"{os.path.basename(each.path)}: {each.reason}", None, each.offset, each.entries
            )
            for each in found.damage
        ],
        remarks,
        nbytes=checkpoint.nbytes,
        tensors=names,
        whole=[name for name in names if name not in lost],
        has_checksums=not found.unverified,
    )


def _verify_archive(
    source: RangeSource, reader: RecordReader, progress: ProgressCallback | None
) -> Verification:
    damage = find_damage(reader, spans_of(reader).find_damage, progress)
    damaged = {each.record for each in damage}
    problems: list[Problem] = []
    remarks = [] if reader.engine.storages_have_crcs else [_WITHOUT_CHECKSUMS]
    found = _Tensors([], {})
    try:
        require_saved_object(reader)
        with reporting_damage(reader.path):
            found = _tensors_in(source, reader, bool(damage))
    except NotCheckpointError as error:
        if not reader.has_record("constants.pkl"):
            raise
        what = str(error).removeprefix(f"{reader.path} ")
        remarks.append(f"the file {what}; its records were compared with their checksums")
    except CorruptCheckpointError as error:
        if error.record not in damaged:
            problems.append(_problem_of(error))
    except UnpicklingError:
        remarks.append(f"{_UNKNOWN_TENSORS} (see `ptsave globals {reader.path}`)")
    if not found.is_whole:
        remarks.append(_TOO_DEEP)
    problems += [
        Problem(each.reason, each.record, each.offset, found.users.get(each.record, []))
        for each in damage
    ]
    lost = {name for problem in problems for name in problem.entries}
    n_records = len(reader.engine.records())
    whole = [name for name in found.names if name not in lost]
    return Verification(
        reader.path,
        problems,
        remarks,
        n_records,
        reader.engine.nbytes,
        found.names or None,
        whole if found.names else None,
        reader.engine.storages_have_crcs,
    )


class _Tensors(NamedTuple):
    """The names of all tensors, and of those in each record; for `is_whole`, see `EntryTree`."""

    names: list[str]
    users: dict[str | None, list[str]]
    is_whole: bool = True


def _tensors_in(source: RangeSource, reader: RecordReader, is_damaged: bool) -> _Tensors:
    """Return the tensors by record; raise UnpicklingError if weights_only=True refuses the file."""
    if not reader.engine.all_stored:  # the pickle is compressed, too
        return _Tensors([], {})
    reader.check_version()
    reader.leaves_opaque = True
    if not can_defer_reading(reader, restricted_unpickler):
        return _tensors_made_of_values(source, reader, is_damaged)
    contents = UnreadContents(reader)
    tree = EntryTree(contents.obj)
    named = tree.named_tensors()
    users: dict[str | None, list[str]] = {}
    places = contents.places_of([tensor for _, tensor in named])
    for (name, _), place in zip(named, places, strict=True):
        users.setdefault(place[1], []).append(name)
    return _Tensors([name for name, _ in named], users, tree.is_whole)


def _tensors_made_of_values(
    source: RangeSource, reader: RecordReader, is_damaged: bool
) -> _Tensors:
    """Do the same as `_tensors_in`, for an object that is built from its tensors' values."""
    found = entries_with_records(reader, set(reader.get_all_records()))
    users: dict[str | None, list[str]] = {}
    for name, record in found:
        users.setdefault(record, []).append(name)
    if found and is_damaged:
        return _Tensors([*dict.fromkeys(name for name, _ in found)], users)
    globals_in_pickle(io.BytesIO(reader.get_record("data.pkl")), reader.path)  # finds damage
    if is_damaged:
        raise UnpicklingError  # before anything is loaded
    tree = EntryTree(open_file(source).obj)
    return _Tensors(_names_in(tree), users, tree.is_whole)


def _names_in(tree: EntryTree) -> list[str]:
    return [name for name, _ in tree.named_tensors()]


def _verify_without_directory(source: RangeSource, error: CorruptCheckpointError) -> Verification:
    """Verify the remaining records of an archive whose ZIP directory is missing or damaged."""
    path = source.name
    archive = CutArchive(source)
    whole = {record.name for record in archive.records if record.is_whole}
    tensors, kept = archive.entries()
    if error.lacks_end and not tensors:
        with suppress(CorruptCheckpointError):  # raised if nothing can be recovered
            return _verify_unfinished(source)
    n_records, nbytes = len(archive.records), archive.nbytes
    lost = [name for name in tensors if name not in set(kept)]
    reason = f"the ZIP directory is damaged: {bare_message(error, path)}"
    if error.lacks_end:
        reason = (
            "the file is cut short or was never finished: the ZIP directory at its end is missing"
        )
    found = "1 record is" if len(whole) == 1 else f"{len(whole)} records are"
    reason += f"; {found} undamaged{' (--recover reads them)' if kept else ''}"
    problem = Problem(reason, None, nbytes, lost)
    return Verification(path, [problem], [], n_records, nbytes, tensors or None, kept or None)


def _verify_unfinished(source: RangeSource) -> Verification:
    """Verify an archive whose end is missing: recover it, and check what was recovered."""
    recovery = recovery_of(source)
    assert recovery is not None
    found = _verify_recovery(source, recovery, None)
    what = f"{'not all of ' if found.problems else ''}the finished part is undamaged"
    reason = (
        "the file is cut short or was never finished: the ZIP directory at its end is missing; "
        f"{what} (--recover reads it)"
    )
    problem = Problem(reason, None, source.nbytes)
    return replace(found, problems=[problem, *found.problems], remarks=[])


def _problem_of(error: CorruptCheckpointError) -> Problem:
    reason = bare_message(error, error.path)
    return Problem(reason, error.record, error.offset, list(error.entries))
