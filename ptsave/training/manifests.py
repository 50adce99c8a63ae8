"""Manifests: small JSON files that say which bytes a checkpoint's file has, and where copies are.

The manifest of ``step-00000010.pt`` is ``step-00000010.pt.json`` in the same directory.  It is
written after the file, so it never describes an incomplete one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias

from ptsave import _C
from ptsave.sources.locations import Location
from ptsave.sources.ranges import RangeSource, open_source
from ptsave.streaming.payload_sources import write_bytes
from ptsave.training.directory import MANIFEST, identify

_PIECE_NBYTES = 16 << 20
# The step, and a text that is greater for a later save of the step.
Key: TypeAlias = "tuple[int, str]"
_MAX_NBYTES = 1 << 20  # of a manifest


class Manifest(NamedTuple):
    """The contents of a manifest."""

    file: str  # the name of the checkpoint's file
    nbytes: int
    digest: str | None  # XXH3-128 of all bytes, 32 hexadecimal digits; None if it is unknown
    save: str = ""  # differs between saves of one step; a later save has a greater text
    # The places that had a copy when this was written: failure domains of hosts, and the slow
    # place's URL or absolute path.  The first is the place in which the manifest itself lies.
    places: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**self._asdict(), "places": list(self.places)}

    @classmethod
    def parse(cls, fields: Any) -> Manifest | None:
        """Return the manifest with these JSON values, or None if they are not a manifest."""
        if not isinstance(fields, dict):
            return None
        file, save, digest = (fields.get(name) for name in ("file", "save", "digest"))
        nbytes, places = fields.get("nbytes"), fields.get("places")
        if not (isinstance(file, str) and isinstance(save, str) and isinstance(places, list)):
            return None
        if not all(isinstance(each, str) for each in places):
            return None
        if type(nbytes) is not int or nbytes < 0:
            return None
        if digest is not None and not (
            isinstance(digest, str) and re.fullmatch("[0-9a-f]{32}", digest)
        ):
            return None
        return cls(file, nbytes, digest, save, tuple(places))

    def at(self, *place: str) -> Manifest:
        """Return the manifest for a copy in another place, which it names first."""
        return self._replace(places=tuple(dict.fromkeys((*place, *self.places))))

    def write(self, folder: Location, *, fsync: bool) -> None:
        """Write the manifest beside its file."""
        text = json.dumps(self.fields(), indent=1).encode()
        write_bytes(folder.file(self.file + MANIFEST), text, fsync=fsync)


def manifest_of(folder: Location, name: str) -> Manifest | None:
    """Return the manifest of the file `name`, or None if there is none that can be read."""
    try:
        path, options = folder.join(name + MANIFEST), folder.storage_options or None
        with closing(open_source(path, options)) as source:
            if source.nbytes > _MAX_NBYTES:
                return None
            found = Manifest.parse(json.loads(b"".join(source.read([(0, source.nbytes)]))))
    except (OSError, RecursionError, ValueError):
        return None
    return found if found is not None and found.file == name else None


class Copy(NamedTuple):
    """A file of a save in one place."""

    rank: int  # of the part
    n_ranks: int
    name: str
    has_manifest: bool


def copies_in(folder: Location) -> Iterator[tuple[Key, Copy]]:
    """Yield the files of all saves in a directory, complete or not, of any number of ranks."""
    files = {*folder.regular_files()}
    for name in files:
        part = identify(name)
        if part is None:
            continue
        save = part.save
        has_manifest = name + MANIFEST in files
        if has_manifest and not save:  # the name is the same for all saves of the step
            manifest = manifest_of(folder, name)
            save = "" if manifest is None else manifest.save
        yield (part.step, save), Copy(part.rank, part.n_ranks, name, has_manifest)


def digest_of(source: RangeSource) -> str:
    """Return the XXH3-128 of all bytes of a file."""
    digest = _C.Xxh3()
    with source.stream() as stream:
        buffer = memoryview(bytearray(min(_PIECE_NBYTES, source.nbytes)))
        while n := stream.readinto(buffer):
            digest.update(buffer[:n])
    return digest.hexdigest()
