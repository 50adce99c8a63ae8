"""Opens the source of a conversion: its object, with tensors whose bytes stay where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptsave.contents.contents import UnreadContents
from ptsave.contents.opening import open_contents
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.streaming.payload_sources import PayloadSources

__all__ = ["SourceCheckpoint"]


class SourceCheckpoint:
    """An open checkpoint, of one file or several, whose tensors are not read.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        As for :func:`ptsave.open`, whose errors it raises.
    sources : PayloadSources
        Learns where the bytes of the tensors are, and closes the files.
    storage_options : mapping, optional
        For the file system of a URL.

    Attributes
    ----------
    path : str
        Its name in messages.
    obj : object
        The saved object; of several files, one dict of all of them.
    nbytes : int
        The sizes of the files.
    paths : list of str
        Their names.
    is_safetensors : bool
        Whether all are safetensors files.
    metadata : dict of str to str
        Their ``__metadata__``.
    remarks : list of str
        Facts that the owner of the files should know.
    """

    def __init__(
        self, f: Any, sources: PayloadSources, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        contents = open_contents(f, storage_options, localize=sources.localize)
        self.path = contents.path
        self.obj = contents.obj
        self.nbytes = contents.nbytes
        self.paths = [part.path for part in contents.parts]
        self.is_safetensors = True
        self.metadata: dict[str, str] = {}
        self.remarks: list[str] = []
        for part in contents.parts:
            sources.add(part)
            if isinstance(part, SafetensorsContents):
                self.metadata.update(part.header.metadata)
                continue
            self.is_safetensors = False
            if isinstance(part, UnreadContents) and not part.reader.engine.storages_have_crcs:
                self.remarks.append(
                    f"{part.path} has no checksums of its storages: they are copied unverified"
                )
