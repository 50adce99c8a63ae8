"""`save(base=)`: the bytes are those of a save without a base, whatever happens to the base."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import Child, eventually, in_child, needs_root, run_python
from safetensors.torch import save_file
from sharing_disks import can_share, nbytes_used, sharing_disk
from stock_comparison import assert_same_object, stock_load, stock_save
from torch.utils.serialization import config

import ptsave
from ptsave import UnsupportedSourceError

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

MIB = 1 << 20


def tensors(n: int = 10, nbytes: int = MIB) -> dict[str, Any]:
    """Frozen weights, and a number that changes."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(0, 256, (n, nbytes), dtype=torch.uint8, generator=generator)
    return {"step": 1, **{f"weight{i}": weights[i].clone() for i in range(n)}}


def without_base(obj: object, path: Path) -> bytes:
    """Return what torch and ptsave write for a file of this name."""
    folder = path.parent / "without base"
    folder.mkdir(exist_ok=True)
    stock_save(obj, folder / path.name)
    expected = (folder / path.name).read_bytes()
    ptsave.save(obj, folder / path.name)
    assert (folder / path.name).read_bytes() == expected
    shutil.rmtree(folder)
    return expected


def save(obj: object, path: Path, base: Path, **options: Any) -> int:
    """Save with a base, and return the number of shared bytes."""
    expected = without_base(obj, path)
    saved = ptsave.save(obj, path, base=base, **options)
    assert saved is not None
    assert path.read_bytes() == expected
    assert saved.written + saved.shared == len(expected)
    return saved.shared


def flip(path: Path, offset: int) -> None:
    """Change a byte of a file in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def base(shared: Path) -> Path:
    """A file of stock torch's; this process does not know its hashes."""
    stock_save(tensors(), shared / "old.pt")
    return shared / "old.pt"


@pytest.fixture(params=["unknown", "known"])
def either(request: pytest.FixtureRequest, base: Path) -> Path:
    """A base whose hashes this process knows, or does not know."""
    if request.param == "known":
        ptsave.save(tensors(), base, base=base)
    return base


# ------------------------------------------------------------------------------ what is shared


def test_nothing_has_changed(either: Path, shared: Path) -> None:
    assert save(tensors(), shared / "new.pt", either) >= 9.8 * MIB
    assert_same_object(stock_load(shared / "new.pt"), tensors())


def test_an_adapter_has_changed(either: Path, shared: Path) -> None:
    obj = tensors()
    obj["weight3"] += 1
    assert 8.8 * MIB <= save(obj, shared / "new.pt", either) <= 9 * MIB
    obj["weight5"][500_000] += 1  # one byte of a tensor
    assert save(obj, shared / "new.pt", either) <= 9 * MIB


def test_everything_has_changed(either: Path, shared: Path) -> None:
    obj = {name: value + 1 for name, value in tensors().items()}
    assert save(obj, shared / "new.pt", either) == 0


def test_a_file_of_its_own(either: Path) -> None:
    for step in range(3):
        obj = tensors() | {"step": step}
        obj["weight3"] += step
        assert save(obj, either, either) >= 8.8 * MIB


def test_the_pickle_grows(either: Path, shared: Path) -> None:
    """With storages at multiples of a page, positions in both files stay equal modulo a page."""
    config.save.storage_alignment = 4096
    ptsave.save(tensors(), either, base=either)
    obj = tensors() | {"losses": list(range(5000))}
    assert save(obj, shared / "new.pt", either) == 10 * MIB
    assert save(obj, shared / "a longer name.pt", either) == 10 * MIB


def test_small_and_empty_tensors(shared: Path) -> None:
    config.save.storage_alignment = 4096
    sizes = [0, 1, 4095, 4096, 16_383, 16_384, 16_385, 65_536, 70_000, 3_000_000]
    obj = [torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)]
    stock_save(obj, shared / "old.pt")
    whole_pages = [size // 4096 * 4096 for size in sizes if size >= 16_384]
    assert save(obj, shared / "new.pt", shared / "old.pt") == sum(whole_pages)


def test_many_tensors(shared: Path) -> None:
    obj = {str(i): torch.full((20,), i) for i in range(20_000)}
    stock_save(obj, shared / "old.pt")
    # Each is smaller than a page, but data.pkl is not.
    assert save(obj, shared / "new.pt", shared / "old.pt") > 1.5 * MIB
    assert save([0, obj], shared / "new.pt", shared / "old.pt") == 0


def test_views_and_dtypes(shared: Path) -> None:
    whole = torch.arange(MIB, dtype=torch.float64)
    obj = [whole, whole[5:50], whole.to(torch.bfloat16), torch.ones(MIB, dtype=torch.complex64)]
    stock_save(obj, shared / "old.pt")
    assert save(obj, shared / "new.pt", shared / "old.pt") > 17 * MIB


def test_old_and_new_use_the_disk_once(base: Path, shared: Path) -> None:
    before = nbytes_used(shared)
    ptsave.save(tensors(), shared / "new.pt", base=base)
    assert nbytes_used(shared) - before < MIB


@pytest.mark.parametrize("fsync", [False, True])
def test_either_file_may_go(either: Path, shared: Path, fsync: bool) -> None:
    new = shared / "new.pt"
    whole = without_base(tensors(), new)
    for spoil in (
        lambda: either.write_bytes(b"x" * (11 * MIB)),
        lambda: os.truncate(either, 5000),
        either.unlink,
    ):
        ptsave.save(tensors(), new, base=either, fsync=fsync)
        spoil()
        assert new.read_bytes() == whole
        stock_save(tensors(), either)
    ptsave.save(tensors(), new, base=either, fsync=fsync)
    old = either.read_bytes()
    new.write_bytes(b"x" * len(whole))
    assert either.read_bytes() == old


# --------------------------------------------------------------------------------- wrong bases


def test_a_byte_of_the_base_has_changed(either: Path, shared: Path) -> None:
    shared_before = 10 * MIB
    for offset in (2_500_000, 5_500_000):
        flip(either, offset)
        now = save(tensors(), shared / "new.pt", either)
        assert 8 * MIB < now < shared_before - 60_000
        shared_before = now


def test_the_time_of_a_change_is_set_back(either: Path, shared: Path) -> None:
    """As by rsync --inplace --times."""
    status = either.stat()
    time.sleep(0.02)  # the clock of a file system has ticks of some milliseconds
    flip(either, 2_500_000)
    os.utime(either, ns=(status.st_atime_ns, status.st_mtime_ns))
    save(tensors(), shared / "new.pt", either)


def _a_shorter_file(base: Path) -> None:
    os.truncate(base, base.stat().st_size // 2)


def _a_safetensors_file(base: Path) -> None:
    save_file({"x": torch.ones(MIB)}, base)


def _a_legacy_file(base: Path) -> None:
    stock_save(tensors(), base, _use_new_zipfile_serialization=False)


def _nothing(base: Path) -> None:
    base.unlink()


def _a_directory(base: Path) -> None:
    base.unlink()
    base.mkdir()


def _an_empty_file(base: Path) -> None:
    base.write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_nothing, FileNotFoundError),
        (_a_directory, IsADirectoryError),
        (_a_shorter_file, ptsave.CorruptCheckpointError),
        (_an_empty_file, UnsupportedSourceError),
        (_a_safetensors_file, UnsupportedSourceError),
        (_a_legacy_file, UnsupportedSourceError),
    ],
)
def test_what_is_no_base(
    either: Path, shared: Path, spoil: Callable[[Path], None], error: type[Exception]
) -> None:
    spoil(either)
    new = shared / "new.pt"
    new.write_bytes(b"old")
    for save_it in (ptsave.save, ptsave.save_checkpoint):
        arguments: Any = ({"x": tensors()}, new) if save_it is ptsave.save else (new,)
        with pytest.raises(error, match=r"old\.pt"):
            save_it(*arguments, base=either)
    with pytest.raises(error, match=r"old\.pt"):
        ptsave.async_save(tensors(), new, base=either).result()
    assert new.read_bytes() == b"old"
    assert sorted(each.name for each in shared.iterdir() if each != either) == ["new.pt"]


def test_a_directory_of_hostile_headers(either: Path, shared: Path) -> None:
    """Bytes behind the payloads are damaged: an error, or the right bytes."""
    whole = either.read_bytes()
    new = shared / "new.pt"
    expected = without_base(tensors(), new)
    for offset in range(10 * MIB + 10_000, len(whole), 7):
        either.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
        with suppress(ptsave.CorruptCheckpointError, UnsupportedSourceError):
            ptsave.save(tensors(), new, base=either)
            assert new.read_bytes() == expected


def test_another_process_replaces_the_base(either: Path, shared: Path) -> None:
    new = shared / "new.pt"
    expected = without_base(tensors(), new)
    others = [tensors(), {name: value + 1 for name, value in tensors().items()}]

    def replace() -> None:
        while True:
            for other in others:
                ptsave.save(other, either)

    child = Child(replace)
    for _ in range(20):
        ptsave.save(tensors(), new, base=either)
        assert new.read_bytes() == expected
    child.kill()


def test_a_link_to_the_base(either: Path, shared: Path) -> None:
    (shared / "last.pt").symlink_to(either.name)
    assert save(tensors(), shared / "new.pt", shared / "last.pt") >= 9.8 * MIB
    # A link as the target: its file is replaced.
    assert save(tensors(), shared / "last.pt", shared / "last.pt") >= 9.8 * MIB
    assert (shared / "last.pt").is_symlink()


# ------------------------------------------------------------------------ targets and options


def test_file_objects_have_no_base(base: Path) -> None:
    with pytest.raises(TypeError, match="base needs a path"):
        ptsave.save(tensors(), io.BytesIO(), base=base)
    with pytest.raises(TypeError, match="base needs a path"):
        ptsave.async_save(tensors(), io.BytesIO(), base=base)


def test_the_legacy_format_has_no_base(base: Path, shared: Path) -> None:
    with pytest.raises(ValueError, match="base needs torch's zip format"):
        ptsave.save(tensors(), shared / "x", base=base, _use_new_zipfile_serialization=False)


def test_writes_in_place_share_nothing(either: Path, shared: Path) -> None:
    assert save(tensors(), shared / "new.pt", either, atomic=False) == 0


def test_skip_data(either: Path, shared: Path) -> None:
    with torch.serialization.skip_data():
        stock_save(tensors(), shared / "new.pt")
        expected = (shared / "new.pt").read_bytes()
        saved = ptsave.save(tensors(), shared / "new.pt", base=either)
    assert saved == (len(expected), 0)
    assert (shared / "new.pt").read_bytes() == expected


def test_without_checksums(either: Path, shared: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        assert save(tensors(), shared / "new.pt", either) >= 9.8 * MIB
        assert save(tensors(), shared / "other.pt", shared / "new.pt") >= 9.8 * MIB
    finally:
        torch.serialization.set_crc32_options(True)
    assert save(tensors(), shared / "third.pt", shared / "other.pt") >= 9.8 * MIB


def test_options_are_carried_to_the_end(base: Path, shared: Path) -> None:
    saved = ptsave.save_checkpoint(shared / "two.pt", model=tensors(), base=base, fsync=True)
    assert saved is not None
    assert saved.shared >= 9.8 * MIB
    assert ptsave.save_checkpoint(shared / "two.pt", model=tensors()) is None
    future = ptsave.async_save(tensors(), shared / "three.pt", base=os.fsencode(base).decode())
    future.result()
    assert future.nbytes_shared >= 9.8 * MIB
    size = (shared / "three.pt").stat().st_size
    assert future.nbytes_written + future.nbytes_shared == size


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_in_the_background(either: Path, shared: Path, staging: Any) -> None:
    obj = tensors()
    path = shared / "new.pt"
    for step in range(3):
        obj["weight7"] += 1
        expected = without_base(obj, path)
        future = ptsave.async_save(obj, path, base=either, staging=staging)
        future.wait_staged()
        obj["weight8"] += 1
        future.result()
        obj["weight8"] -= 1
        assert path.read_bytes() == expected, step
        assert 8.8 * MIB < future.nbytes_shared < 9 * MIB


# ------------------------------------------------------------------------- other file systems


def test_another_file_system(base: Path, tmp_path: Path) -> None:
    if base.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("the temporary directory can share blocks itself")
    assert save(tensors(), tmp_path / "new.pt", base) == 0


def test_a_file_system_that_cannot_share(tmp_path: Path) -> None:
    if can_share(tmp_path):
        pytest.skip("the temporary directory can share blocks")
    stock_save(tensors(), tmp_path / "old.pt")
    for _ in range(2):
        assert save(tensors(), tmp_path / "new.pt", tmp_path / "old.pt") == 0


@needs_root
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_nearly_full_disk(tmp_path: Path, kind: str) -> None:
    """Shared bytes need no space; a file that does not fit leaves the old one."""
    with sharing_disk(tmp_path, kind) as disk:
        obj = tensors(100)
        ptsave.save(obj, disk / "old.pt", base=None)
        ptsave.save(obj, disk / "last.pt", base=disk / "old.pt")
        free = shutil.disk_usage(disk).free
        filling = disk / "filling"
        with open(filling, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - 24 * MIB)
        obj["weight3"] += 1
        for base in (disk / "old.pt", disk / "last.pt"):
            saved = ptsave.save(obj, disk / "last.pt", base=base, fsync=True)
            assert saved is not None
            assert saved.shared > 98 * MIB
            assert_same_object(stock_load(disk / "last.pt"), obj)
        changed = {name: value + 1 for name, value in obj.items()}
        with pytest.raises(ptsave.SaveError) as caught:
            ptsave.save(changed, disk / "last.pt", base=disk / "old.pt", fsync=True)
        assert caught.value.errno == errno.ENOSPC
        assert_same_object(stock_load(disk / "last.pt"), obj)
        assert sorted(os.listdir(disk)) == ["filling", "last.pt", "old.pt"]


# ------------------------------------------------------------------------------ several savers


def test_two_savers_of_one_path(either: Path, shared: Path) -> None:
    path = shared / "new.pt"
    objects = [tensors() | {"weight5": torch.full((MIB,), i)} for i in range(2)]
    whole = [without_base(obj, path) for obj in objects]
    stop = threading.Event()
    seen = set()

    def save_often(obj: object) -> None:
        for _ in range(20):
            saved = ptsave.save(obj, path, base=either)
            assert saved is not None
            assert saved.shared > 5 * MIB

    threads = [threading.Thread(target=save_often, args=[obj]) for obj in objects]
    for thread in threads:
        thread.start()
    eventually(path.exists)
    while any(thread.is_alive() for thread in threads):
        seen.add(whole.index(path.read_bytes()))
    stop.set()
    for thread in threads:
        thread.join()
    assert seen


def test_forked_children_use_the_base(either: Path, shared: Path) -> None:
    def child() -> None:
        assert save(tensors(), shared / "child.pt", either) >= 9.8 * MIB

    in_child(child)
    assert save(tensors(), shared / "new.pt", either) >= 9.8 * MIB


def test_a_saver_that_is_killed(either: Path) -> None:
    """A killed save leaves the old file or the new one, whole."""
    objects = [tensors() | {"step": step} for step in range(2)]
    whole = [without_base(obj, either) for obj in objects]
    ptsave.save(objects[0], either)

    def save_often() -> None:
        while True:
            for obj in objects:
                ptsave.save(obj, either, base=either)

    for i in range(20):
        child = Child(save_often)
        threading.Event().wait(0.01 + 0.007 * i)
        child.kill()
        assert either.read_bytes() in whole
    assert save(objects[1], either, either) >= 9.8 * MIB
    assert os.listdir(either.parent) == [either.name]


def test_the_first_save_of_a_process(base: Path, shared: Path) -> None:
    code = "import ptsave, sys, torch; from ptsave.serialization import save\n"
    code += "print(save(torch.load(sys.argv[1]), sys.argv[2], base=sys.argv[1]).shared >> 20)"
    assert run_python(code, base, shared / "new.pt").stdout.strip() == "9"
    assert (shared / "new.pt").read_bytes() == without_base(tensors(), shared / "new.pt")
