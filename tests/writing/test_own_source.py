"""Operations whose target is what they read: the file is right afterwards, or it is as it was.

On two kinds of files: those that can be replaced, and those that can only be overwritten, because
they are mount points (as in containers) or in a directory that may not be written.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _system import as_nobody, mounted, needs_root
from command_line import succeed

import ptsave
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert

State = dict[str, torch.Tensor]


@pytest.fixture(params=["replaceable", pytest.param("mounted", marks=needs_root)])
def place(request: pytest.FixtureRequest, folder: Path) -> Iterator[Path]:
    """The name of a file that is there."""
    path = folder / "model.pt"
    path.touch()
    if request.param == "replaceable":
        yield path
        return
    behind = folder / "behind.pt"
    behind.touch()
    with mounted(path, "--bind", behind):
        yield path


def put(path: Path, obj: Any) -> bytes:
    """Write a file in place, as torch does; return its bytes."""
    torch.save(obj, path)
    return path.read_bytes()


def is_mounted(path: Path) -> bool:
    return (path.parent / "behind.pt").exists()


def equal(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


# ------------------------------------------------------------------------------------- compact


def wasteful() -> State:
    fat = torch.arange(1_000_000.0)
    return {"a": fat[250_000:375_000], "b": fat[875_000:], "c": fat[100:200]}


def name_of(place: Path, by: str) -> Path:
    """Return the name of a file, of a new link to it, or a second one of the same file."""
    name = place.with_name("link.pt")
    if by == "name":
        return place
    if by == "symbolic link":
        name.symlink_to(place.name)
    elif is_mounted(place):
        return place.with_name("behind.pt")
    else:
        name.hardlink_to(place)
    return name


@pytest.mark.parametrize("by", ["name", "symbolic link", "hard link"])
def test_compact(place: Path, by: str) -> None:
    put(place, wasteful())
    if by == "hard link" and is_mounted(place):
        pytest.skip("a mount point has no second name")
    name = name_of(place, by)
    done = compact(name)
    assert done.is_written
    assert equal(torch.load(name), wasteful())
    assert name.stat().st_size == done.nbytes < 2_000_000
    assert equal(torch.load(place), wasteful()), "the other name"


@needs_root
def test_compact_by_the_name_behind_a_mount_point(folder: Path) -> None:
    path, behind = folder / "model.pt", folder / "behind.pt"
    put(behind, wasteful())
    path.touch()
    with mounted(path, "--bind", behind):
        with pytest.raises(FileExistsError, match="the source itself"):
            compact(behind, path, force=True)
        assert compact(path).is_written
    assert equal(torch.load(behind), wasteful())


@needs_root
def test_compact_where_only_the_file_may_be_written(folder: Path) -> None:
    path = folder / "model.pt"
    put(path, wasteful())
    path.chmod(0o666)

    as_nobody(lambda: succeed("compact", path, "--in-place"))
    assert equal(torch.load(path), wasteful())
    assert path.stat().st_size < 2_000_000
    assert os.listdir(folder) == ["model.pt"]


@needs_root
def test_compact_without_room_for_a_temporary_file(folder: Path) -> None:
    path = folder / "model.pt"
    before = put(path, {"a": torch.arange(4_000_000.0)[:2_000_000]})
    path.chmod(0o666)
    small = folder / "small"
    small.mkdir()

    def run() -> None:
        tempfile.tempdir = str(small)
        with pytest.raises(ptsave.SaveError) as caught:
            compact(path)
        assert caught.value.errno == errno.ENOSPC

    with mounted(small, "-t", "tmpfs", "-o", "size=1m,mode=1777", "none"):
        as_nobody(run)
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------------- convert


@pytest.mark.parametrize("by", ["name", "symbolic link", "hard link"])
def test_convert(place: Path, by: str) -> None:
    before = put(place, wasteful())
    source = name_of(place, by)
    for one, other in [(source, place), (place, source), (place, place)]:
        with pytest.raises(FileExistsError, match="the source itself"):
            convert(one, other, force=True)
    assert place.read_bytes() == before


def test_convert_into_a_directory_that_links_to_the_source(tmp_path: Path) -> None:
    # As the Hugging Face cache has its files.
    blob, snapshot = tmp_path / "blobs" / "0123.safetensors", tmp_path / "snapshot"
    blob.parent.mkdir()
    snapshot.mkdir()
    ptsave.save_model({"a": torch.arange(10.0)}, tmp_path)
    (tmp_path / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to("../blobs/0123.safetensors")
    before = blob.read_bytes()
    with pytest.raises(FileExistsError, match="a file of the source"):
        convert(blob, snapshot, force=True)
    assert blob.read_bytes() == before


# ------------------------------------------------------------------------------------- extract


def test_extract(place: Path) -> None:
    state = {"a": torch.arange(2_000_000.0), "b": torch.ones(3)}
    put(place, state)
    succeed("extract", place, "a", "-o", place, "--force")
    assert torch.equal(torch.load(place), state["a"])


# ---------------------------------------------------------------------------------------- save


def by_storage(path: Path, shared: bool) -> State:
    storage: Any = torch.UntypedStorage.from_file(str(path), shared, path.stat().st_size)
    return {"bytes": torch.tensor([], dtype=torch.uint8).set_(storage)}


MAPPINGS: dict[str, Callable[[Path], State]] = {
    "load": lambda path: dict(ptsave.load(path, mmap=True)),
    "torch.load": lambda path: dict(torch.load(path, mmap=True)),
    "storage": lambda path: by_storage(path, False),
    "shared storage": lambda path: by_storage(path, True),
    "numpy": lambda path: {"bytes": torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))},
}


@pytest.mark.parametrize("mapped", MAPPINGS)
@pytest.mark.parametrize("atomic", [False, True])
def test_tensors_that_are_mapped_from_the_file(place: Path, mapped: str, atomic: bool) -> None:
    before = put(place, {"a": torch.arange(300_000.0), "b": torch.ones(3)})
    state = MAPPINGS[mapped](place)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    obj = {"pad": torch.zeros(12345, dtype=torch.uint8), **state}
    if is_mounted(place):
        assert_mapped(obj, place, atomic=atomic)
        assert place.read_bytes() == before
    else:
        ptsave.save(obj, place, atomic=atomic)
        assert equal(torch.load(place), {"pad": obj["pad"], **expected})
    assert equal(state, expected)


@pytest.mark.parametrize("atomic", [False, True])
def test_mapped_file_by_another_name(place: Path, atomic: bool) -> None:
    before = put(place, {"a": torch.arange(300_000.0)})
    other = place.with_name("behind.pt") if is_mounted(place) else place.with_name("second.pt")
    if not other.exists():
        other.hardlink_to(place)
    state = ptsave.load(place, mmap=True)
    ptsave.save(dict(state), other, atomic=atomic)  # which can be replaced in either case
    assert equal(torch.load(other), {"a": torch.arange(300_000.0)})
    assert equal(state, {"a": torch.arange(300_000.0)})
    assert place.read_bytes() == before


@needs_root
def test_mapped_file_that_only_may_be_overwritten(folder: Path) -> None:
    path = folder / "model.pt"
    before = put(path, {"a": torch.arange(300_000.0)})
    path.chmod(0o666)
    state = ptsave.load(path, mmap=True)
    as_nobody(lambda: assert_mapped(state, path))
    with path.open("r+b") as stream:
        assert_mapped(state, f"/proc/self/fd/{stream.fileno()}")
    assert path.read_bytes() == before


def assert_mapped(state: Any, path: Any, **options: Any) -> None:
    """Fail unless the file is refused as the one that the tensors are mapped from."""
    with pytest.raises(ptsave.SaveError, match="mapped") as caught:
        ptsave.save(dict(state), path, **options)
    assert caught.value.errno == errno.EBUSY


@pytest.mark.parametrize("atomic", [False, True])
def test_tensors_of_an_open_archive(place: Path, atomic: bool) -> None:
    state = {"a": torch.arange(300_000.0), "b": torch.ones(3)}
    put(place, state)
    with ptsave.open(place) as archive:
        found = {"pad": torch.zeros(9), **{name: archive[name] for name in state}}
        ptsave.save(found, place, atomic=atomic)
    assert equal(torch.load(place), {"pad": torch.zeros(9), **state})


# ---------------------------------------------------------------------------------- save_model


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("size", ["5GB", "300KB"])
def test_model_that_is_mapped_from_its_directory(tmp_path: Path, kind: Any, size: str) -> None:
    state = {f"{i}.weight": torch.full((200, 200), float(i)) for i in range(4)}
    ptsave.save_model(state, tmp_path, format=kind, max_shard_size=size)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(200, 200, bias=False) for _ in range(4)))
    ptsave.load_model(model, tmp_path, device="cpu")
    for other in ("5GB", "170KB", size):
        ptsave.save_model(model, tmp_path, format=kind, max_shard_size=other)
        assert equal(model.state_dict(), state)
        again = torch.nn.Sequential(*(torch.nn.Linear(200, 200, bias=False) for _ in range(4)))
        ptsave.load_model(again, tmp_path)
        assert equal(again.state_dict(), state)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_model_file_that_can_only_be_overwritten(place: Path, kind: Any) -> None:
    name = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}[kind]
    state = {"weight": torch.arange(40_000.0).view(200, 200)}
    if not is_mounted(place):
        pytest.skip("as above")
    folder = place.parent / "model"
    ptsave.save_model(state, folder, format=kind)
    path, behind = folder / name, place.parent / "behind.bin"
    shutil.copy(path, behind)
    with mounted(path, "--bind", behind):
        with torch.device("meta"):
            model = torch.nn.Linear(200, 200, bias=False)
        ptsave.load_model(model, folder, device="cpu")
        before = behind.read_bytes()
        try:
            ptsave.save_model(model, folder, format=kind)
        except ptsave.SaveError:
            assert behind.read_bytes() == before
        assert equal(model.state_dict(), state)
        again = torch.nn.Linear(200, 200, bias=False)
        ptsave.load_model(again, folder)
        assert equal(again.state_dict(), state)
