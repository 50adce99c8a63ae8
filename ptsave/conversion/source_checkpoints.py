"""Opens the source of a conversion: its object, with tensors whose bytes stay in their files."""

from __future__ import annotations

from ptsave.contents.contents import Contents, UnreadContents
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.streaming.payload_sources import PayloadSources


class SourceCheckpoint:
    """An open checkpoint, of one file or several, whose tensors are not read.

    ``sources.localize`` has returned the files of `contents`, and `sources` learns the places of
    the tensors.  `remarks` has facts that the owner of the files should know.
    """

    def __init__(self, contents: Contents, sources: PayloadSources) -> None:
        self.contents = contents
        self.path = contents.path
        self.obj = contents.obj
        self.nbytes = contents.nbytes
        parts = contents.parts
        self.paths = [part.path for part in parts]
        self.is_safetensors = True
        self.metadata: dict[str, str] = {}
        self.remarks: list[str] = []
        for part in parts:
            sources.add(part)
            if isinstance(part, SafetensorsContents):
                self.metadata.update(part.header.metadata)
                continue
            self.is_safetensors = False
            if part.kind == "dcp":
                self._add_ranks(part)
            if isinstance(part, UnreadContents) and not part.reader.engine.storages_have_crcs:
                self.remarks.append(
                    f"{part.path} has no checksums of its storages: they are copied unverified"
                )

    def _add_ranks(self, contents: Contents) -> None:
        from ptsave.contents.dcp import DcpContents  # imports a torch module, for a second

        assert isinstance(contents, DcpContents)
        checkpoint = contents.checkpoint
        self.paths.append(checkpoint.metadata_path)
        self.paths += [checkpoint.file(name) for name in checkpoint.sizes]
