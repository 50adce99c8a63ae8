"""Saving and loading when the world around them misbehaves."""

from __future__ import annotations

import errno
import io
import mmap
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import NOBODY, as_nobody, become_nobody, in_child, mounted, needs_root, run_python

import ptsave

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

MIB = 1 << 20
OLD = {"name": "old", "weight": torch.arange(1000)}
NEW = {"name": "new", "weight": torch.arange(5000).flip(0), "bias": torch.ones(3)}


@pytest.fixture
def path(folder: Path) -> Path:
    """A file with `OLD`, in a folder that other users can reach, too."""
    path = folder / "model.pt"
    ptsave.save(OLD, path)
    return path


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two flat dictionaries of tensors and plain values are equal."""
    if list(a) != list(b):
        return False
    pairs = ((a[key], b[key]) for key in a)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def assert_holds(path: str | Path, expected: dict[str, Any]) -> None:
    assert same(ptsave.load(path), expected)
    assert same(torch.load(path), expected)


def large(nbytes: int, value: int = 1) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((nbytes,), value, dtype=torch.uint8)}


def huge() -> dict[str, torch.Tensor]:
    """Return 3 GiB that take no memory: private pages that were never written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return {"weight": torch.frombuffer(mmap.mmap(-1, 3 << 30, flags=flags), dtype=torch.uint8)}


def assert_refused(path: str | Path, number: int, obj: object = NEW, **options: Any) -> None:
    """Check that saving fails with a SaveError that says why and where."""
    with pytest.raises(ptsave.SaveError) as caught:
        ptsave.save(obj, path, **options)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == number, caught.value
    assert caught.value.filename == str(path)


# ------------------------------------------------------------------------------------ no more space


@contextmanager
def disk_of(kind: str, nbytes: int, folder: Path) -> Iterator[Path]:
    """Mount a file system of this size below a folder."""
    target = folder / "disk"
    target.mkdir()
    if kind == "tmpfs":
        with mounted(target, "-t", "tmpfs", "-o", f"size={nbytes}", "none") as disk:
            yield disk
        return
    image = folder / "image"
    with image.open("wb") as stream:
        stream.truncate(nbytes)
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
    if mkfs is None:
        pytest.skip("no mkfs.ext4")
    subprocess.run([mkfs, "-q", "-m", "0", str(image)], check=True)
    with mounted(target, "-o", "loop", image) as disk:
        yield disk


@pytest.fixture(params=[("tmpfs", 24 * MIB), ("ext4", 28 * MIB)], ids=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, folder: Path) -> Iterator[Path]:
    """A file system with less than 24 MiB of room."""
    kind, nbytes = request.param
    with disk_of(kind, nbytes, folder) as disk:
        yield disk


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("direct_io", ["0", "1"])
def test_full_disk_leaves_the_old_file(
    small_disk: Path, fsync: bool, direct_io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PTSAVE_DIRECT_IO", direct_io)
    path = small_disk / "model.pt"
    ptsave.save(OLD, path)
    names = set(os.listdir(small_disk))
    free = shutil.disk_usage(small_disk).free
    for nbytes in (25 * MIB, free + 1, 400 * MIB):
        assert_refused(path, errno.ENOSPC, large(nbytes), fsync=fsync)
        assert set(os.listdir(small_disk)) == names
        assert shutil.disk_usage(small_disk).free == free
    assert_holds(path, OLD)
    assert_refused(small_disk / "other.pt", errno.ENOSPC, large(30 * MIB), fsync=fsync)
    assert set(os.listdir(small_disk)) == names
    ptsave.save(NEW, path, fsync=fsync)
    assert_holds(path, NEW)


@pytest.mark.parametrize("sizes", [(9, 9, 9, 9, 9), (9, 9, 13, 9, 13), (20, 2, 20, 2, 20)])
def test_room_of_replaced_files_counts(small_disk: Path, sizes: tuple[int, ...]) -> None:
    """Blocks that nobody has waited for are free when the next save needs them."""
    path = small_disk / "model.pt"
    for nbytes in sizes:
        with suppress(ptsave.SaveError):  # both do not fit: it has to go first
            ptsave.save(large(nbytes * MIB), path)
            continue
        path.unlink()
        ptsave.save(large(nbytes * MIB), path)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_room_of_replaced_files_counts_in_place(kind: str, folder: Path) -> None:
    with disk_of(kind, 100 * MIB, folder) as disk:
        path, other = disk / "model.pt", disk / "other.pt"
        contents = large(24 * MIB)
        ptsave.save(contents, path)
        ptsave.save(OLD, other, atomic=False)
        filling = large(shutil.disk_usage(disk).free - MIB)
        for _ in range(10):
            ptsave.save(OLD, other, atomic=False)
            ptsave.save(contents, path)  # the blocks of the old one are free in a moment
            ptsave.save(filling, other, atomic=False)
            assert_holds(other, filling)


def test_replaced_files_are_let_go_of_before_a_fork(tmp_path: Path) -> None:
    def no_file_without_a_name_is_open() -> None:
        descriptors = Path("/proc/self/fd")
        names = [os.readlink(each) for each in descriptors.iterdir() if each.is_symlink()]
        assert not [name for name in names if name.startswith(str(tmp_path))], names

    for _ in range(5):
        ptsave.save(large(32 * MIB), tmp_path / "model.pt")
        in_child(no_file_without_a_name_is_open)


def test_full_disk_without_preallocation(small_disk: Path) -> None:
    # Holes are not reserved, so the disk fills while they are jumped over.
    path = small_disk / "model.pt"
    ptsave.save(OLD, path)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(MIB))
    with filler.open("ab", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(b"x")
    with torch.serialization.skip_data():
        assert_refused(path, errno.ENOSPC, large(MIB))
    filler.unlink()
    assert_holds(path, OLD)


def test_full_disk_in_place(small_disk: Path) -> None:
    path = small_disk / "model.pt"
    assert_refused(path, errno.ENOSPC, large(30 * MIB), atomic=False)
    assert not path.exists()
    ptsave.save(NEW, path, atomic=False)
    assert_refused(path, errno.ENOSPC, large(30 * MIB), atomic=False)
    assert_holds(path, NEW)


def test_full_disk_behind_a_file_object(small_disk: Path) -> None:
    with (small_disk / "model.pt").open("wb") as stream, pytest.raises(OSError) as caught:
        ptsave.save(large(30 * MIB), stream)
    assert caught.value.errno == errno.ENOSPC


def test_full_device() -> None:
    assert_refused("/dev/full", errno.ENOSPC)
    with open("/dev/full", "wb", buffering=0) as stream, pytest.raises(OSError) as caught:
        ptsave.save(NEW, stream)
    assert caught.value.errno == errno.ENOSPC


@needs_root
def test_no_more_threads(folder: Path) -> None:
    folder.chmod(0o777)
    contents = large(40 * MIB)
    expected = io.BytesIO()
    torch.save(contents, expected)

    def limit() -> None:
        become_nobody()
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))

    def save_and_load() -> None:
        with pytest.raises(RuntimeError):
            threading.Thread(target=print).start()
        for fsync in (False, True):
            ptsave.save(contents, folder / "archive.pt", fsync=fsync)
            assert (folder / "archive.pt").read_bytes() == expected.getvalue()
        assert ptsave.load(folder / "archive.pt")["weight"].numel() == 40 * MIB

    in_child(save_and_load, limit)


def test_no_more_descriptors(folder: Path, path: Path) -> None:
    outcomes = []
    for n_free in range(8):

        def limit(n_free: int = n_free) -> None:
            used = max(int(name) for name in os.listdir("/proc/self/fd"))
            for fd in range(3, used):  # fill the gaps
                if not os.path.exists(f"/proc/self/fd/{fd}"):
                    os.dup2(0, fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + n_free, used + n_free))

        def save_and_load() -> None:
            error = OSError(errno.EMFILE, "none", str(path))
            try:
                ptsave.save(NEW, path)
                assert same(ptsave.load(path), NEW)
            except OSError as caught:
                error = caught
            assert (error.errno, error.filename) == (errno.EMFILE, str(path))

        in_child(save_and_load, limit)
        outcomes.append(path.stat().st_size)
        assert os.listdir(folder) == ["model.pt"]
        ptsave.load(path)
    assert len(set(outcomes)) == 2, "one limit was too low, another was enough"


@pytest.mark.parametrize("room", [1 * MIB, 8 * MIB, 9 * MIB, 20 * MIB, 70 * MIB])
def test_no_more_memory(folder: Path, room: int) -> None:
    path = folder / "model.pt"
    contents = large(60 * MIB)
    ptsave.save(OLD, path)
    ptsave.save(contents, folder / "large.pt")

    def limit() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))

    def save_and_load() -> None:
        with suppress(MemoryError):
            ptsave.save(contents, path, fsync=True)
        with suppress(MemoryError):
            ptsave.load(folder / "large.pt")
        assert sorted(os.listdir(folder)) == ["large.pt", "model.pt"]

    in_child(save_and_load, limit)
    assert same(ptsave.load(path), OLD) or same(ptsave.load(path), contents)


@pytest.mark.parametrize("atomic", [False, True])
def test_file_size_limit(folder: Path, path: Path, atomic: bool) -> None:

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))

    def save() -> None:
        assert_refused(path, errno.EFBIG, large(2 * MIB), atomic=atomic)
        ptsave.save(OLD, path, atomic=atomic)

    in_child(save, limit)
    assert_holds(path, OLD)
    assert os.listdir(folder) == ["model.pt"]


# -------------------------------------------------------------------------------------- permissions


@needs_root
def test_directory_in_which_only_the_file_is_writable(folder: Path, path: Path) -> None:
    path.chmod(0o666)
    folder.chmod(0o755)
    inode = path.stat().st_ino
    as_nobody(lambda: ptsave.save(NEW, path, fsync=True))
    assert_holds(path, NEW)
    assert path.stat().st_ino == inode
    assert path.stat().st_uid == 0
    as_nobody(lambda: assert_refused(folder / "other.pt", errno.EACCES))
    assert os.listdir(folder) == ["model.pt"]


@needs_root
@pytest.mark.parametrize("atomic", [False, True])
def test_file_that_may_not_be_written(folder: Path, path: Path, atomic: bool) -> None:
    # Replacing it would be possible: the directory is writable.  But its owner has said no.
    path.chmod(0o444)
    as_nobody(lambda: assert_refused(path, errno.EACCES, atomic=atomic))
    assert_holds(path, OLD)
    assert os.listdir(folder) == ["model.pt"]


@needs_root
def test_directory_that_may_not_be_entered(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    ptsave.save(OLD, closed / "model.pt")

    def save() -> None:
        with pytest.raises(ptsave.SaveError):
            ptsave.save(NEW, closed / "model.pt")

    as_nobody(save)
    assert_holds(closed / "model.pt", OLD)


@needs_root
def test_directory_that_may_not_be_listed(folder: Path) -> None:
    folder.chmod(0o733)
    as_nobody(lambda: ptsave.save(NEW, folder / "model.pt", fsync=True))
    as_nobody(lambda: ptsave.save(OLD, folder / "model.pt", fsync=True))
    assert_holds(folder / "model.pt", OLD)
    assert os.listdir(folder) == ["model.pt"]


@needs_root
def test_sticky_directory(folder: Path, path: Path) -> None:
    # Only a file's owner may rename over it, others may write into it (if the kernel lets them).
    path.chmod(0o666)
    folder.chmod(0o1777)
    inode = path.stat().st_ino
    if Path("/proc/sys/fs/protected_regular").read_text().strip() == "0":
        as_nobody(lambda: ptsave.save(NEW, path))
        assert_holds(path, NEW)
        assert path.stat().st_ino == inode
    os.chown(path, NOBODY, NOBODY)
    as_nobody(lambda: ptsave.save(OLD, path))
    assert_holds(path, OLD)
    assert path.stat().st_ino != inode
    assert os.listdir(folder) == ["model.pt"]


@needs_root
def test_group_of_a_shared_folder_keeps_its_files(path: Path) -> None:
    os.chown(path, 1234, 4242)
    path.chmod(0o660)

    in_child(lambda: ptsave.save(NEW, path), lambda: become_nobody(groups=(4242,)))
    assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (4242, 0o660)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755, 0o664])
@pytest.mark.parametrize("atomic", [False, True])
def test_mode_of_the_old_file_stays(path: Path, mode: int, atomic: bool) -> None:
    path.chmod(mode)
    ptsave.save(NEW, path, atomic=atomic)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0])
@pytest.mark.parametrize("atomic", [False, True])
def test_mode_of_a_new_file_is_the_umask(tmp_path: Path, mask: int, atomic: bool) -> None:
    path = tmp_path / "model.pt"
    before = os.umask(mask)
    try:
        ptsave.save(NEW, path, atomic=atomic)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@needs_root
def test_owner_of_the_old_file_stays(path: Path) -> None:
    os.chown(path, 1234, 5678)
    ptsave.save(NEW, path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 5678)


@needs_root
def test_descriptor_of_a_file_that_may_not_be_opened_again(path: Path) -> None:
    with path.open("rb") as stream:
        path.chmod(0o600)

        def load() -> None:
            assert same(ptsave.load(stream), OLD)

        as_nobody(load)


# ---------------------------------------------------------------------------- links and other names


@pytest.mark.parametrize("atomic", [False, True])
def test_symbolic_links_stay(tmp_path: Path, atomic: bool) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "links").mkdir()
    target = tmp_path / "checkpoints" / "step.pt"
    ptsave.save(OLD, target)
    first, second = tmp_path / "links" / "latest.pt", tmp_path / "model.pt"
    first.symlink_to("../checkpoints/step.pt")
    second.symlink_to("links/latest.pt")
    for link in (first, second):
        ptsave.save(OLD, target)
        ptsave.save(NEW, link, atomic=atomic)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert_holds(target, NEW)
    assert os.listdir(tmp_path / "checkpoints") == ["step.pt"]
    assert os.listdir(tmp_path / "links") == ["latest.pt"]


@pytest.mark.parametrize("atomic", [False, True])
def test_dangling_link_gets_its_target(tmp_path: Path, atomic: bool) -> None:
    (tmp_path / "checkpoints").mkdir()
    link = tmp_path / "model.pt"
    link.symlink_to("checkpoints/step.pt")
    ptsave.save(NEW, link, atomic=atomic)
    assert link.is_symlink()
    assert_holds(tmp_path / "checkpoints" / "step.pt", NEW)
    link.unlink()
    link.symlink_to("nowhere/step.pt")
    assert_refused(link, errno.ENOENT, atomic=atomic)


def test_link_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    ptsave.save(NEW, tmp_path / "link" / "model.pt")
    assert_holds(tmp_path / "real" / "model.pt", NEW)
    assert_refused(tmp_path / "link", errno.EISDIR)


def test_name_of_an_open_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with path.open("w+b") as stream:
        path.unlink()
        ptsave.save(NEW, f"/proc/self/fd/{stream.fileno()}")
        assert same(ptsave.load(stream), NEW)


def test_hard_links(tmp_path: Path) -> None:
    # Replaced: the other name keeps what it had.  In place: both names show the new contents.
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"
    ptsave.save(OLD, path)
    other.hardlink_to(path)
    ptsave.save(NEW, path, atomic=False)
    assert_holds(other, NEW)
    ptsave.save(OLD, path)
    assert_holds(path, OLD)
    assert_holds(other, NEW)


@pytest.mark.parametrize("length", [200, 235, 252])
@pytest.mark.parametrize("letter", ["n", "ü"])
def test_long_names(tmp_path: Path, length: int, letter: str) -> None:
    path = tmp_path / (letter * (length // len(letter.encode())) + ".pt")
    for contents in (OLD, NEW):
        ptsave.save(contents, path, fsync=True)
        assert_holds(path, contents)
    assert_refused(tmp_path / ("n" * 256), errno.ENAMETOOLONG)
    assert os.listdir(tmp_path) == [path.name]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/mod\xffel.pt")
    ptsave.save(NEW, path)
    assert same(ptsave.load(path), NEW)
    assert_refused(path + "/below", errno.ENOENT)


def test_directory_changes_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    contents = large(200 * MIB)
    monkeypatch.chdir(first)
    saving = threading.Thread(target=lambda: ptsave.save(contents, "model.pt"))
    saving.start()
    for _ in range(1000):
        if os.listdir(first):
            break
        time.sleep(0.001)
    os.chdir(second)
    saving.join()
    assert os.listdir(first) == ["model.pt"]
    assert os.listdir(second) == []
    assert torch.equal(ptsave.load(first / "model.pt")["weight"], contents["weight"])


# -------------------------------------------------------------------------------- pipes and devices


def test_pipe_whose_reader_leaves(tmp_path: Path) -> None:
    path = tmp_path / "archive.pt"
    os.mkfifo(path)

    def read_a_little() -> None:
        with path.open("rb", buffering=0) as stream:
            stream.read(10)

    reader = threading.Thread(target=read_a_little)
    reader.start()
    assert_refused(path, errno.EPIPE, large(10 * MIB))
    reader.join()


# ------------------------------------------------------------------- files that are being looked at


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("fsync", [False, True])
def test_file_that_the_tensors_are_mapped_from(tmp_path: Path, atomic: bool, fsync: bool) -> None:
    path = tmp_path / "model.pt"
    contents = {"a": torch.rand(5 * MIB), "b": torch.arange(100)}
    ptsave.save(contents, path)
    before = path.read_bytes()
    mapped = ptsave.load(path, mmap=True)
    ptsave.save(mapped, path, atomic=atomic, fsync=fsync)
    assert path.read_bytes() == before
    assert same(mapped, contents)
    shifted = {"pad": torch.zeros(12345, dtype=torch.uint8), **mapped}
    ptsave.save(shifted, path, atomic=atomic, fsync=fsync)
    assert same(ptsave.load(path), shifted)
    assert same(mapped, contents)


@pytest.mark.parametrize("fsync", [False, True])
def test_fork_during_a_save(tmp_path: Path, fsync: bool) -> None:
    path = tmp_path / "model.pt"
    contents = large(300 * MIB)
    saving = threading.Thread(target=lambda: ptsave.save(contents, path, fsync=fsync))
    saving.start()
    for attempt in range(5):

        def save_and_load(attempt: int = attempt) -> None:
            ptsave.save(OLD, tmp_path / f"child{attempt}.pt")
            ptsave.save(large(MIB), tmp_path / f"child{attempt}.pt")
            assert same(ptsave.load(tmp_path / f"child{attempt}.pt"), large(MIB))

        in_child(save_and_load)
    saving.join()
    assert torch.equal(ptsave.load(path)["weight"], contents["weight"])
    assert sorted(os.listdir(tmp_path)) == [*(f"child{i}.pt" for i in range(5)), "model.pt"]


# ------------------------------------------------------------------------------------- interruption


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Check that SIGINT, sent after some time, ends the block within a second."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, send)
    timer.start()
    try:
        yield
        timer.cancel()
        pytest.fail("over before the signal came")
    except KeyboardInterrupt:
        assert time.monotonic() - sent[0] < 1
    timer.join()


# The signal may come between an open() of Python code and its `with`; CPython then leaves the file
# to its destructor.
_may_leave_files_open = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@_may_leave_files_open
@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("seconds", [0.02, 0.3])
def test_interrupt_ends_a_save(folder: Path, path: Path, fsync: bool, seconds: float) -> None:
    contents = huge()
    with interrupted(seconds):
        ptsave.save(contents, path, fsync=fsync)
    assert os.listdir(folder) == ["model.pt"]
    assert_holds(path, OLD)


def test_interrupt_ends_a_save_to_a_stream() -> None:
    class Slow(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            time.sleep(0.005)
            return len(data)

    contents = large(256 * MIB)
    with interrupted(0.2):
        ptsave.save(contents, Slow())


def test_interrupt_ends_a_save_to_memory() -> None:
    contents = {str(i): torch.zeros(64 * MIB, dtype=torch.uint8) for i in range(8)}
    stream = io.BytesIO(b"before")
    stream.seek(6)
    with interrupted(0.05):
        for _ in range(100):
            stream.seek(6)
            ptsave.save(contents, stream)
            stream.truncate(6)
    # Wherever it came: either all of a save or nothing.
    assert stream.getvalue()[:6] == b"before"


@_may_leave_files_open
@pytest.mark.parametrize("seconds", [0.02, 0.2])
def test_interrupt_ends_a_load(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "model.pt"
    with torch.serialization.skip_data():
        ptsave.save(huge(), path)  # a hole: takes no space
    with warnings.catch_warnings(), interrupted(seconds):
        warnings.simplefilter("ignore", ptsave.CheckpointWarning)
        ptsave.load(path)


def test_errors_of_the_progress_bar_end_a_save(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm

    def explode(*_: object) -> None:
        raise ValueError("the terminal is gone")

    monkeypatch.setattr(tqdm.tqdm, "update", explode)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # a thread that stays
    with pytest.raises(ValueError, match="the terminal is gone"):
        ptsave.save(huge(), path, progress=True)
    assert os.listdir(folder) == ["model.pt"]
    assert_holds(path, OLD)


_EXIT_SCRIPT = """
import io, sys, threading, time
import torch, ptsave
from ptsave import _C

folder = sys.argv[1]
contents = {str(i): torch.zeros(1 << 20, dtype=torch.uint8) for i in range(64)}
for name in ("save", "load"):
    ptsave.save(contents, f"{folder}/{name}.pt")

def work(what):
    while True:
        if what == "save":
            ptsave.save(contents, f"{folder}/save.pt")
        elif what == "stream":
            with open("/dev/null", "wb") as stream:
                ptsave.save(contents, stream)
        else:  # the engine's part: torch's own, like torch.load, aborts the process now and then
            with open(f"{folder}/load.pt", "rb") as file:
                reader = _C.Reader.open_descriptor(file.fileno(), 0, b"", direct=True)
            records = range(len(reader.records()))
            reader.start(list(records), n_threads=2, verify=True, exact_offsets=False)
            reader.wait(3, progress=None)
            reader.wait_all(progress=None)
            reader.read(0, verify=True)

for what in ("save", "stream", "load") * 2:
    threading.Thread(target=work, args=(what,), daemon=True).start()
time.sleep(0.3)
"""


def test_interpreter_exits_while_threads_work(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(ptsave.__file__).parents[1])}
    assert run_python(_EXIT_SCRIPT, tmp_path, env=environment).stderr == ""
    for name in ("save.pt", "load.pt"):
        assert len(ptsave.load(tmp_path / name)) == 64
        ptsave.save(OLD, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["load.pt", "save.pt"]


# -------------------------------------------------------------------------------- arguments, errors


@needs_root
def test_file_that_is_a_mount_point(folder: Path) -> None:
    # As containers have them: it cannot be renamed over, only written to.
    path, behind = folder / "model.pt", folder / "behind.pt"
    ptsave.save(OLD, path)
    ptsave.save(OLD, behind)
    with mounted(path, "--bind", behind):
        ptsave.save(NEW, path)
        assert_holds(path, NEW)
    assert_holds(behind, NEW)
    assert_holds(path, OLD)
    assert sorted(os.listdir(folder)) == ["behind.pt", "model.pt"]


@needs_root
def test_read_only_file_system(folder: Path) -> None:
    target = folder / "disk"
    target.mkdir()
    with mounted(target, "-t", "tmpfs", "none") as disk:
        ptsave.save(OLD, disk / "model.pt")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ptsave.SaveError) as caught:
            ptsave.save(NEW, disk / "model.pt")
        assert caught.value.errno in (errno.EROFS, errno.EACCES)
        assert_refused(disk / "other.pt", errno.EROFS)
        assert_holds(disk / "model.pt", OLD)


def test_refused_pickle_module_leaves_nothing_open(path: Path) -> None:
    old_dill = types.ModuleType("dill")
    old_dill.__version__ = "0.1.0"  # type: ignore[attr-defined]
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="dill"):
        ptsave.load(path, pickle_module=old_dill, weights_only=False)
    assert os.listdir("/proc/self/fd") == before
