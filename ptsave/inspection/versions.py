"""Verifies the versions that `ptsave.deltas` writes into a directory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from ptsave.deltas import versions
from ptsave.deltas.applying import in_threads, patch_in_place
from ptsave.errors import bare_message
from ptsave.inspection.reports import Problem, Verification
from ptsave.models.iterating import iter_weights
from ptsave.sources.locations import Location

_UNKNOWN_BASE = "the results of patches were not compared: their base is unknown, see --base"
_ERRORS = (OSError, ValueError, RuntimeError)  # of versions that are damaged


def verify_versions(root: Location, base: Any = None) -> Iterator[Verification]:
    """Check every index, file, frame and position, and the checksums of results if they are known.

    `base` are the files of the weights that the first version changes.  The results of later
    versions are also known behind a whole version.  All weights are then in memory.  If `base` has
    other weights, this raises ValueError.
    """
    weights: dict[str, Tensor] | None = None
    at: int | None = None  # the version of these weights
    if base is not None:
        weights = {name: versions.bytes_in(tensor) for name, tensor in iter_weights(base)}
    numbers = versions.numbers_in(root)
    for number in numbers:
        path = root.join(versions.name_of(number))
        try:
            version, patches = versions.open_version(root, number)
        except _ERRORS as error:
            yield Verification(path, [Problem(bare_message(error, path))])
            continue
        if version.encoding == versions.WHOLE:
            weights, at = {}, number
        if begins := weights is not None and at is None:
            at = version.base
        is_known = at is not None and (at == number or version.changes(at))
        problems = _problems_of(patches, weights if is_known else None)
        if begins and problems and not _problems_of(patches, None):
            raise ValueError(f"--base is not version {at}: {problems[0].reason}")
        if numbers[0] < version.base < number and version.base not in numbers:
            problems.append(Problem(f"it is based on version {version.base}, which is missing"))
        if is_known:
            weights, at = (None, None) if problems else (weights, number)
        names = [patch.name for patch in patches]
        damaged = {name for problem in problems for name in problem.entries}
        yield Verification(
            path,
            problems,
            [] if is_known else [_UNKNOWN_BASE],
            nbytes=sum(patch.nbytes for patch in patches),
            tensors=names,
            whole=[name for name in names if name not in damaged],
            has_checksums=is_known,
        )


def _problems_of(patches: list[versions.Patch], weights: dict[str, Tensor] | None) -> list[Problem]:
    """Check patches, and change the weights if they are their base."""
    tied = versions.tied(patches, weights or {})
    checked = (patch for patch in patches if patch.name not in tied)
    return [*filter(None, in_threads(partial(_problem_of, weights=weights), checked))]


def _problem_of(patch: versions.Patch, weights: dict[str, Tensor] | None) -> Problem | None:
    """Check a patch, and change the weights if they are its base."""
    try:
        if weights is not None and patch.is_whole:
            weights[patch.name] = patch.whole()
        elif weights is not None and patch.name not in weights:
            return Problem(f"the base has no tensor {patch.name}", entries=[patch.name])
        elif weights is not None:
            patch_in_place(weights[patch.name], [patch], is_base_known=True)
        elif patch.version.encoding == "overwrite":
            patch.overwritten()
        else:
            for _ in patch.xor_blocks(patch.xor_nbytes()):
                pass
    except _ERRORS as error:
        return Problem(bare_message(error, patch.source.name), entries=[patch.name])
    return None
