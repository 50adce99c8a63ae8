"""Loads a safetensors file as `torch.load` would: into tensors with memory of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import accelerator_of
from ptsave.archive.loading import LoadOptions
from ptsave.archive.unpickling import fills_storages, is_meta_location
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.contents.safetensors_header import StoredTensor, read_header
from ptsave.sources.ranges import LocalFile, RangeSource
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, progress_bar
from ptsave.support.torch_serialization import restore_location

_CPU = torch.device("cpu")


def load_safetensors(source: RangeSource, options: LoadOptions) -> dict[str, Tensor]:
    """Load all tensors of a file, in the order of their bytes.

    For `map_location`, every tensor was saved on the CPU.  `verify` has no effect, because the
    format has no checksums.  A missing safetensors package is a RuntimeError with torch's words.
    """
    location = options.map_location
    with _torchs_words_for_missing_library():
        tensors = _tensors_of(source, options)
    return tensors if location is None else {k: _placed(v, location) for k, v in tensors.items()}


@contextmanager
def _torchs_words_for_missing_library() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise RuntimeError(
            "Attempting to load a safetensors file but safetensors is not installed. "
            f"Please install safetensors with: pip install safetensors ({error})"
        ) from error


def _tensors_of(source: RangeSource, options: LoadOptions) -> dict[str, Tensor]:
    location = options.map_location
    if not fills_storages(location):
        stored = read_header(source).tensors
        device = "meta" if is_meta_location(location) else "cpu"
        return {
            each.name: torch.empty(each.shape, dtype=each.dtype, device=device) for each in stored
        }
    if isinstance(source, LocalFile) and not options.mmap:
        stored = read_header(source).tensors
        with progress_bar(options.progress, "loading", source.nbytes) as callback:
            values = _read(source, stored, accelerator_of(location) or _CPU, callback)
        return {each.name: value for each, value in zip(stored, values, strict=True)}
    contents = SafetensorsContents(source, maps=options.mmap)
    values = contents.read(list(contents.obj.values()), None)
    return dict(zip(contents.obj, values, strict=True))


def _read(
    file: LocalFile,
    stored: Sequence[StoredTensor],
    device: torch.device,
    progress: ProgressCallback | None,
) -> list[Tensor]:
    values = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in stored]
    ranges = [
        (0, file.begin + each.offset, value)
        for each, value in zip(stored, values, strict=True)
        if each.nbytes > 0
    ]
    limits = config.current()
    files = _C.RangeFiles([file.for_engine], n_threads=limits.n_readers, direct=limits.direct_reads)
    files.read(
        ranges,
        n_threads=limits.n_readers,
        max_pinned_nbytes=limits.max_pinned_nbytes,
        progress=progress,
    )
    return values


def _placed(tensor: Tensor, map_location: Any) -> Tensor:
    """Return a tensor where `map_location` puts a tensor that was saved on the CPU."""
    storage = restore_location(map_location)(tensor.untyped_storage(), "cpu")
    placed = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return placed.set_(storage, 0, tensor.shape, tensor.stride())
