"""`fold` and `remove`: make directories of versions smaller."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave import _C
from ptsave.deltas import versions
from ptsave.deltas.applying import in_threads
from ptsave.deltas.versions import INDEX, WHOLE, Patch, folder_of, name_of, numbers_in, version_in
from ptsave.models.save_model import save_errors
from ptsave.sources.locations import Location
from ptsave.support.calls import check_flags, checked_int
from ptsave.writing.targets import resolve_folder


class Folding(NamedTuple):
    """Result of `fold`.

    Attributes
    ----------
    path : str
        The path or URL of the newest version.
    base : int
        The version that its patches change.
    removed : list of int
        The numbers of the versions that are part of it now, or would be part of it.
    n_tensors : int
        Number of tensors that the version changes.
    nbytes_before, nbytes : int
        The bytes of all patches, before and after.
    """

    path: str
    base: int
    removed: list[int]
    n_tensors: int
    nbytes_before: int
    nbytes: int


def fold(
    directory: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Folding:
    """Make one version of all versions with patches since the last whole one.

    It has the number of the newest version, and the base of the first one.  The others are removed.
    The weights are not needed.  If the process is killed, the newest version still applies.

    Parameters
    ----------
    directory : str or os.PathLike
        The directory of the versions, or its URL.
    dry_run : bool, default False
        Whether to change nothing, and only return what would change.
    fsync : bool, default False
        Whether to wait until the files have reached the disk.
    storage_options : mapping, optional
        Arguments for the file system of a URL.

    Returns
    -------
    Folding
        What was done: a named tuple.

    Raises
    ------
    ValueError
        If the versions differ in their encodings or checksums.
    CorruptCheckpointError
        If a patch or an index is damaged.
    FileNotFoundError
        If there is no version, or one is missing.
    SaveError
        If the files cannot be written, or another process changes the newest version.

    Notes
    -----
    With the encoding ``"overwrite"``, :func:`apply` also brings weights of a removed version to the
    newest one.  With ``"xor"``, such weights need a whole version.  SGLang needs all numbers, so it
    applies a folded version only to its base, if that has the number before.

    Examples
    --------
    >>> import tempfile, torch
    >>> from ptsave.deltas import Publisher, fold
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     publisher = Publisher(folder, {"a": torch.zeros(9)}, max_depth=None)
    ...     for i in range(3):
    ...         _ = publisher.publish({"a": torch.full((9,), float(i + 1))})
    ...     fold(folder).removed
    [1, 2]
    """
    check_flags(dry_run=dry_run, fsync=fsync)
    root = resolve_folder(directory, storage_options)
    newest = versions.newest_in(root)
    if newest is None:
        raise FileNotFoundError(errno.ENOENT, "there is no version", root.name)
    path = root.join(name_of(newest))
    with ExitStack() as stack:
        if not (root.is_url or dry_run):
            with save_errors(root.name):
                stack.enter_context(versions.staging_of(root, newest))
        chain = [each for each in versions.links(root, newest, None) if each[0].encoding != WHOLE]
        if not chain:
            return Folding(path, newest, [], 0, 0, 0)
        last, first = chain[0][0], chain[-1][0]
        forms = sorted({f"{each.encoding} with {each.checksum}" for each, _ in chain})
        if len(forms) > 1:
            raise ValueError(
                f"{root.name}: versions {first.number} to {newest} have patches of several forms "
                f"({', '.join(forms)}), which make one version only with the weights"
            )
        patches = versions.by_tensor(chain)
        folded, removed = last, []
        if len(chain) > 1:
            folded = last._replace(base=first.base, folded_from=first.folded_from or first.number)
        if folded.folded_from:
            removed = [each for each in numbers_in(root) if folded.base < each < newest]
        frames = dict(zip(patches, in_threads(_merged, patches.values()), strict=True))
        if not dry_run:
            stack.enter_context(save_errors(root.name))
            folder = folder_of(root, newest)
            folder.remove_leftovers(lambda name: name.endswith((".safetensors", ".json")))
            if folded != last:
                # Until the index names this file, readers find the old patches.
                shard = f"model-{secrets.token_hex(4)}-00000-of-00001.safetensors"
                checksums = {name: found[-1].checksum for name, found in patches.items()}
                versions.write_patches(folder, folded, frames, checksums, shard=shard, fsync=fsync)
            _, used = version_in(root, newest)
            for name in {*folder.files()} - {*used.values()}:
                if name.endswith(".safetensors"):
                    folder.remove(name)
            for number in reversed(removed):  # so each version that is left has its base
                _remove(root, number)
        before = sum(patch.nbytes for found in patches.values() for patch in found)
        after = sum(frame.nbytes for frame in frames.values())
        return Folding(path, folded.base, removed, len(frames), before, after)


def _merged(patches: list[Patch]) -> Tensor:
    """Return a compressed patch with the effect of several ones of one encoding."""
    if len(patches) == 1:
        return versions.tensor_of(patches[0].read())
    if patches[0].version.encoding == "overwrite":
        merged = versions.tensor_of(patches[0].overwritten())
        for patch in patches[1:]:
            merged = _C.merge_patches(merged, patch.overwritten())
        return versions.compressed(merged)
    nbytes = patches[-1].xor_nbytes()
    zeros = torch.zeros(min(nbytes, versions.BLOCK_NBYTES), dtype=torch.uint8)
    steps: Iterator[Any] = zip(*(patch.xor_blocks(nbytes) for patch in patches), strict=True)
    return versions.xor_frame(((zeros, 0, blocks) for blocks in steps), nbytes)


def remove(
    directory: str | os.PathLike[str],
    version: int,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Remove a version that no later version is based on.

    Parameters
    ----------
    directory : str or os.PathLike
        The directory of the versions, or its URL.
    version : int
        The number of the version.
    storage_options : mapping, optional
        Arguments for the file system of a URL.

    Raises
    ------
    ValueError
        If a later version is based on it, or it is the newest version, on which a publisher bases
        the next one.
    FileNotFoundError
        If there is no such version.
    SaveError
        If the files cannot be removed.

    Examples
    --------
    >>> import tempfile, torch
    >>> from ptsave.deltas import Publisher, remove
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     publisher = Publisher(folder, {"a": torch.zeros(9)}, max_depth=0)
    ...     for i in range(2):
    ...         _ = publisher.publish({"a": torch.full((9,), float(i))})
    ...     remove(folder, 1)
    """
    version = checked_int(version, "version", 0)
    root = resolve_folder(directory, storage_options)
    numbers = numbers_in(root)
    if version not in numbers:
        path = root.join(name_of(version))
        raise FileNotFoundError(errno.ENOENT, "there is no such version", path)
    if version == numbers[-1]:
        raise ValueError(
            f"{root.name}: version {version} is the newest one, on which a publisher bases the next"
        )
    for number in numbers:
        if number > version and version_in(root, number)[0].base == version:
            raise ValueError(
                f"{root.name}: version {number} is based on version {version}: remove the later "
                "versions first, or make one of them with `ptsave compact --in-place`"
            )
    with save_errors(root.name):
        _remove(root, version)


def _remove(root: Location, number: int) -> None:
    folder = folder_of(root, number)
    folder.remove(INDEX)  # from now on, this is no version
    folder.remove_all()
