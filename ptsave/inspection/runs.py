"""Lists the steps of a training run in several directories: which are whole, which protected.

The manifests beside the files tell the files' sizes, and name places that are not looked at.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from ptsave.inspection.reports import Problem, Verification
from ptsave.sources.ranges import Folder, open_source
from ptsave.support.threads import ThreadPool
from ptsave.training.directory import MANIFEST
from ptsave.training.manifests import Copy, Manifest, copies_in, digest_of, manifest_of

_N_THREADS = 16  # requests to a URL at the same time
_N_NAMED = 3


class FoundCopy(NamedTuple):
    """A file of a save in one directory; `manifest` is None if it is missing or damaged."""

    save: tuple[int, str, int]  # the step, the save's name, and the number of parts
    file: Copy
    nbytes: int
    manifest: Manifest | None

    @property
    def defect(self) -> str:
        """The reason why the copy is not whole, or ""."""
        name = self.file.name
        if self.manifest is None:
            return f"{name}{MANIFEST} is {'damaged' if self.file.has_manifest else 'missing'}"
        if self.nbytes != self.manifest.nbytes:
            return f"{name} has {self.nbytes:,} bytes, not {self.manifest.nbytes:,}"
        return ""


class RunDirectory(NamedTuple):
    """A directory of a run, by the path or URL that the user wrote, and the files in it."""

    path: str
    folder: Folder
    copies: dict[str, FoundCopy]  # by path or URL

    @classmethod
    def of(cls, path: str, folder: Folder) -> RunDirectory:
        """List the files; at a URL, this makes one or two requests for each file."""
        with ThreadPool(_N_THREADS, "ptsave-listing") as pool:
            calls = [pool.submit(_look_at, folder, *each) for each in copies_in(folder)]
        found = sorted(filter(None, (call.result() for call in calls)), key=lambda each: each[:2])
        return cls(path, folder, {folder.join(each.file.name): each for each in found})

    def own_places(self) -> set[str]:
        """Return the names by which manifests call this directory."""
        path = self.folder.path
        manifests = [copy.manifest for copy in self.copies.values() if copy.manifest is not None]
        first = {place for each in manifests for place in each.places[:1]}
        return {path if self.folder.is_url else os.path.abspath(path), *first}

    def compared(self, found: Verification) -> Verification:
        """Add a problem to the result for a file if its bytes differ from its manifest."""
        copy = self.copies.get(found.path)
        if copy is None:
            return found
        wanted = copy.manifest and copy.manifest.digest
        if wanted is None and not (copy.file.has_manifest and copy.defect):
            remark = "there is no digest to compare, because the file has no manifest"
            return replace(found, remarks=[*found.remarks, remark])
        reason = copy.defect
        if not reason:
            with closing(open_source(found.path, self.folder.storage_options)) as source:
                digest = digest_of(source)
            reason = f"its XXH3-128 is {digest}, not {wanted} as in its manifest"
            if digest == wanted:
                return found
        return replace(found, problems=[*found.problems, Problem(reason)])


class RunStep(NamedTuple):
    """A save of a step; ``ptsave ls --json`` prints these fields under the same names."""

    step: int
    save: str  # differs between saves of the step
    parts: int
    directories: dict[str, int]  # the number of whole parts in each
    elsewhere: list[str]  # places that only manifests name
    nbytes: int  # of one copy of each part
    absent: str  # the ranks without a part, as a text
    defects: list[str]  # of parts that no directory has whole
    protected: bool


def _look_at(folder: Folder, key: Any, file: Copy) -> FoundCopy | None:
    """Return the facts about a file, or None if the run has just removed it."""
    try:
        with closing(open_source(folder.join(file.name), folder.storage_options)) as source:
            nbytes = source.nbytes
    except FileNotFoundError:
        return None
    manifest = manifest_of(folder, file.name) if file.has_manifest else None
    return FoundCopy((*key, file.n_ranks), file, nbytes, manifest)


def steps_in(directories: Collection[RunDirectory]) -> list[RunStep]:
    """Return the saves of the steps that lie in these directories, the lowest step first."""
    looked_at: set[str] = set().union(*(each.own_places() for each in directories))
    saves: dict[tuple[int, str, int], dict[str, list[FoundCopy]]] = {}
    for directory in directories:
        for copy in directory.copies.values():
            saves.setdefault(copy.save, {}).setdefault(directory.path, []).append(copy)
    return [_step(*save, saves[save], looked_at) for save in sorted(saves)]


def _step(
    step: int, save: str, n_parts: int, found: Mapping[str, list[FoundCopy]], looked_at: set[str]
) -> RunStep:
    copies = [copy for each in found.values() for copy in each]
    whole = [copy for copy in copies if not copy.defect]
    parts = {copy.file.rank: copy for copy in [*copies, *whole]}  # a whole copy, if there is one
    places: dict[int, set[str]] = {rank: set() for rank in parts}
    for copy in whole:
        here, *others = (copy.manifest and copy.manifest.places) or ("",)
        # A directory that was looked at counts only if the copy was found there.
        places[copy.file.rank] |= {here, *(each for each in others if each not in looked_at)}
    return RunStep(
        step,
        save,
        n_parts,
        {path: sum(not copy.defect for copy in each) for path, each in found.items()},
        sorted(set().union(*places.values()) - looked_at),
        sum(copy.nbytes for copy in parts.values()),
        _absent(parts, n_parts),
        [copy.defect for copy in parts.values() if copy.defect],
        len(parts) == n_parts and all(map(_is_safe, places.values())),
    )


def _absent(there: Collection[int], n_parts: int) -> str:
    n = n_parts - len(there)
    ranks = (str(rank) for rank in range(n_parts) if rank not in there)
    named = ", ".join(islice(ranks, min(n, _N_NAMED)))  # `n_parts` may be any number
    more = f" and {n - _N_NAMED:,} more" if n > _N_NAMED else ""
    return f"no part of rank {named}{more}" if n else ""


def _is_safe(places: set[str]) -> bool:
    """Return whether a part survives the loss of a host: it has two hosts, or the slow place."""
    return len(places) > 1 or any("://" in each or os.path.isabs(each) for each in places)
