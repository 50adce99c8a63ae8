"""Directories whose files can share blocks: the temporary one, or an image of XFS or btrfs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _system import IS_ROOT, mounted

_FICLONE = 0x40049409
_IMAGE_NBYTES = 400 << 20  # mkfs.xfs refuses less than 300 MiB


def can_share(folder: Path) -> bool:
    """Return whether files in a directory can share blocks."""
    source, clone = folder / ".source", folder / ".clone"
    source.write_bytes(b"x" * 8192)
    try:
        with open(source, "rb") as reading, open(clone, "wb") as writing:
            fcntl.ioctl(writing, _FICLONE, reading.fileno())
    except OSError:
        return False
    finally:
        source.unlink()
        clone.unlink()
    return True


@contextmanager
def sharing_disk(folder: Path, kind: str = "", nbytes: int = _IMAGE_NBYTES) -> Iterator[Path]:
    """Yield a directory whose files can share blocks; without `kind`, that is any file system.

    Skips the test if there is none.
    """
    if not kind and can_share(folder):
        yield folder
        return
    if not IS_ROOT:
        pytest.skip("files share blocks on XFS and btrfs, and only root may mount one")
    kinds = [kind] if kind else ["xfs", "btrfs"]
    kind = next((kind for kind in kinds if shutil.which(f"mkfs.{kind}")), "")
    if not kind:
        pytest.skip("there is no mkfs.xfs and no mkfs.btrfs: install xfsprogs")
    image, target = folder / f"{kind}.image", folder / kind
    target.mkdir()
    with open(image, "wb") as file:
        os.truncate(file.fileno(), nbytes)
    subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True)
    try:
        with mounted(target, "-o", "loop", image) as disk:
            yield disk
    finally:
        image.unlink()


def nbytes_used(folder: Path) -> int:
    """Return how much of a directory's file system is in use; it has synced its files before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        subprocess.run(["sync", "-f", str(folder)], check=True)
        status = os.fstatvfs(descriptor)
    finally:
        os.close(descriptor)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
