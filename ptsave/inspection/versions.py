"""Lists and verifies the versions that `ptsave.deltas` writes into a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ptsave.deltas.applying import in_threads, patch_in_place
from ptsave.deltas.versions import WHOLE, Patch, bytes_in, name_of, numbers_in, open_version
from ptsave.errors import bare_message
from ptsave.inspection.reports import Problem, Verification
from ptsave.models.iterating import iter_weights
from ptsave.sources.locations import Location

_UNKNOWN_BASE = (
    "the results of patches were not compared, because their base is unknown: see --base"
)


class ListedVersion(NamedTuple):
    """The facts about a version."""

    version: int
    base: int | None  # None for a whole version
    kind: str  # "overwrite", "xor" or "whole"
    checksum: str | None
    tensors: int
    nbytes: int  # of all patches or tensors
    ratio: float | None  # of nbytes to the bytes of all weights, if a version is whole
    modified: float | None  # in seconds since 1970; None at a URL


def list_versions(root: Location) -> Iterator[ListedVersion | Exception]:
    """Yield each version in a directory, or the error that opening it raises."""
    found: list[ListedVersion | Exception] = []
    whole = 0
    for number in numbers_in(root):
        try:
            each = listed(root, number)
        except (OSError, ValueError, RuntimeError) as error:
            found.append(error)
        else:
            whole = whole or (each.nbytes if each.base is None else 0)
            found.append(each)
    for facts in found:
        if whole and isinstance(facts, ListedVersion):
            yield facts._replace(ratio=facts.nbytes / whole)
        else:
            yield facts


def listed(root: Location, number: int) -> ListedVersion:
    """Return the facts about a version; its ratio is not known yet."""
    version, patches = open_version(root, number)
    modified = None if root.is_url else os.stat(root.join(name_of(number))).st_mtime
    nbytes = sum(patch.nbytes for patch in patches)
    is_whole = version.encoding == WHOLE
    return ListedVersion(
        number,
        None if is_whole else version.base,
        version.encoding,
        None if is_whole else version.checksum,
        len(patches),
        nbytes,
        None,
        modified,
    )


def verify_versions(root: Location, base: Any = None) -> Iterator[Verification]:
    """Check every index, file, frame and position, and the checksums of results if they are known.

    `base` are the files of the weights that the first version changes.  The results of later
    versions are also known behind a whole version.  All weights are then in memory.
    """
    weights: dict[str, Tensor] | None = None
    at: int | None = None  # the version of these weights
    if base is not None:
        weights = {name: bytes_in(tensor) for name, tensor in iter_weights(base)}
    numbers = numbers_in(root)
    for number in numbers:
        path = root.join(name_of(number))
        try:
            version, patches = open_version(root, number)
        except (OSError, ValueError, RuntimeError) as error:
            yield Verification(path, [Problem(bare_message(error, path))])
            continue
        problems = []
        if version.encoding == WHOLE:
            weights, at = {}, number
        elif weights is not None and at is None:
            at = version.base
        if numbers[0] < version.base < number and version.base not in numbers:
            problems.append(Problem(f"it is based on version {version.base}, which is missing"))
        is_known = at is not None and (at == number or version.changes(at))

        known = weights if is_known else None

        def check(patch: Patch, known: dict[str, Tensor] | None = known) -> Problem | None:
            try:
                _check(patch, known)
            except (OSError, ValueError, RuntimeError) as error:
                return Problem(bare_message(error, patch.source.name), entries=[patch.name])
            return None

        problems += filter(None, in_threads(check, patches))
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


def _check(patch: Patch, weights: dict[str, Tensor] | None) -> None:
    """Check a patch, and change the weights if they are its base."""
    if patch.is_whole:
        assert weights is not None
        weights[patch.name] = patch.whole()
    elif weights is not None:
        if patch.name not in weights:
            raise ValueError(f"{patch.source.name}: the base has no tensor {patch.name}")
        patch_in_place(weights[patch.name], [patch], is_base_known=True)
    elif patch.version.encoding == "overwrite":
        patch.overwritten()
    else:
        for _ in patch.xor_blocks(patch.xor_nbytes()):
            pass
