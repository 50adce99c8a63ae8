"""An `ArchiveWriter` that is killed, forked, starved or left: nothing that was finished is lost."""

from __future__ import annotations

import errno
import functools
import gc
import io
import os
import random
import resource
import signal
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from _system import Child, in_child, mounted, run_python
from kill_rounds import ROUNDS, SEED
from stock_comparison import assert_same_object

import ptsave
from ptsave import _C
from ptsave.archive.recovery import CutArchive, CutRecord
from ptsave.archive.surviving import SavedEntries
from ptsave.background import saves as background
from ptsave.sources.ranges import Buffer, LocalFile

MIB = 1 << 20


def leftover_of(path: Path) -> Path:
    (leftover,) = path.parent.glob(f".{path.name}.*.ptsave")
    return leftover


def recovered(path: Path) -> dict[str, Any]:
    with ptsave.open(path, recover=True) as archive:
        obj: dict[str, Any] = archive._contents.obj
        return {name: archive[name] for name in obj}


def unfinished(path: Path, entries: dict[str, Any], flush_each: bool = True) -> Path:
    """Write entries in a process that is killed, and return what it leaves."""

    def write() -> None:
        writer = ptsave.ArchiveWriter(path)
        for name, value in entries.items():
            writer.add(name, value)
            if flush_each:
                writer.flush()
        writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(write)
    status, message = child.wait()
    assert os.WIFSIGNALED(status), message
    return leftover_of(path)


ENTRIES: dict[str, Any] = {
    "a": torch.arange(10.0),
    "plain": {"b": [1, "two", None]},
    "view": torch.arange(12).view(3, 4).t(),
    "empty": torch.empty(0),
    "c": torch.randn(1000),
}


def test_recovery(path: Path) -> None:
    leftover = unfinished(path, ENTRIES)
    assert_same_object(recovered(leftover), ENTRIES)
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.open(leftover)
    with ptsave.open(leftover, recover=True) as archive:
        archive.verify()
        assert archive.get_slice("view")[1:].tolist() == ENTRIES["view"][1:].tolist()
    stream = io.BytesIO(leftover.read_bytes())
    with ptsave.open(stream, recover=True) as archive:
        assert_same_object(archive["plain"], ENTRIES["plain"])


def test_recovery_of_a_whole_file(path: Path) -> None:
    with ptsave.ArchiveWriter(path) as writer:
        writer.add_group(ENTRIES)
    assert_same_object(recovered(path), ENTRIES)
    torch.save(ENTRIES, path)
    assert_same_object(recovered(path), ENTRIES)


def test_recovery_of_other_files(path: Path) -> None:
    path.write_bytes(b"PK\3\4 and then nothing, for quite a while that is")
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.open(path, recover=True)


def test_every_cut(path: Path) -> None:
    """At every length, what is there is a beginning of what was written."""
    whole = unfinished(path, ENTRIES).read_bytes()
    names = list(ENTRIES)
    n_seen = 0
    for nbytes in sorted({*range(30, len(whole), 37), len(whole)}):
        stream = io.BytesIO(whole[:nbytes])
        try:
            with ptsave.open(stream, recover=True) as archive:
                obj: Any = archive._contents.obj
                assert list(obj) == names[: len(obj)]
                assert len(obj) >= n_seen
                n_seen = len(obj)
                for name in obj:
                    assert_same_object(archive[name], ENTRIES[name])
        except ptsave.CorruptCheckpointError:
            assert n_seen == 0
    assert n_seen == len(names)


def records_of(content: bytes) -> list[CutRecord]:
    return CutArchive(Buffer(io.BytesIO(content), "whole")).records


def needed_by(pickle: bytes) -> set[str]:
    """Return the names of the records that a pickle needs."""
    return {f"data/{number}" for number in SavedEntries(pickle).storages}


@pytest.mark.filterwarnings("ignore::ptsave.errors.CheckpointWarning")
def test_a_changed_byte_takes_one_record_along(path: Path) -> None:
    """Whatever byte it is, all entries that do not need the record are there, and right."""
    whole = unfinished(path, ENTRIES).read_bytes()
    names = dict(zip((f".journal/{i}" for i in range(len(ENTRIES))), ENTRIES, strict=True))
    needs: dict[str, str] = {}
    for record in records_of(whole):
        payload = whole[record.payload_offset : record.payload_offset + record.nbytes]
        if record.name in names:
            needs[record.name] = names[record.name]
            needs |= dict.fromkeys(needed_by(payload), names[record.name])
    for number, record in enumerate(records_of(whole)):
        step = 1 if record.nbytes < 200 else 61
        for offset in range(record.header_offset, record.end, step):
            damaged = bytearray(whole)
            damaged[offset] ^= (0x55, 0x02, 0xFF)[(offset - record.header_offset + number) % 3]
            with ptsave.open(io.BytesIO(damaged), recover=True) as archive:
                obj: Any = archive._contents.obj
                lost = ENTRIES.keys() - obj.keys()
                assert lost <= {needs[record.name]}, (record, offset)
                for name in obj:
                    assert_same_object(archive[name], ENTRIES[name])
                archive.verify()


def damage(leftover: Path, record: str) -> None:
    (found,) = (each for each in records_of(leftover.read_bytes()) if each.name == record)
    with leftover.open("r+b") as file:
        file.seek(found.payload_offset + found.nbytes // 2)
        byte = file.read(1)
        file.seek(-1, io.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_damaged_records_are_named(path: Path) -> None:
    """Of one batch, all entries but those that need them are there."""
    entries: dict[str, Any] = {f"{i}": [torch.full((9,), i), {"i": [i]}] for i in range(9)}
    leftover = unfinished(path, {**entries, "late": 1}, flush_each=False)
    damage(leftover, "data/0")
    damage(leftover, "data/7")
    with pytest.warns(ptsave.CheckpointWarning, match="data/0, data/7; without the entries 0, 7$"):
        found = recovered(leftover)
    del entries["0"], entries["7"]
    assert_same_object(found, {**entries, "late": 1})


def test_entries_behind_damage_may_be_nested_deeply(path: Path) -> None:
    """As deep as those that can be saved, which is more than Python's pickler bears."""
    deep: Any = torch.arange(3)
    for _ in range(400):
        deep = [deep]
    shared = {"set": {1, "a"}, "big": 1 << 80, "text": "\ud800", "none": (None, (), 1.5, b"b")}
    tied: list[Any] = [shared, shared]
    tied.append((tied,))
    leftover = unfinished(path, {"lost": torch.ones(3), "deep": deep, "tied": tied})
    damage(leftover, "data/0")
    with pytest.warns(ptsave.CheckpointWarning, match="without the entries lost"):
        found = recovered(leftover)
    assert list(found) == ["deep", "tied"]
    assert found["tied"][0] is found["tied"][1]
    assert found["tied"][0] == shared
    assert found["tied"][2][0] is found["tied"]
    for _ in range(400):
        (found["deep"],) = found["deep"]
    assert torch.equal(found["deep"], torch.arange(3))


def test_a_lost_storage_may_have_any_key(path: Path) -> None:
    leftover = unfinished(path, {"lost": torch.ones(3), "there": torch.ones(2)})
    content = leftover.read_bytes()
    (record,) = (each for each in records_of(content) if each.name == ".journal/0")
    begin, end = record.payload_offset, record.payload_offset + record.nbytes
    journal = content[begin:end].replace(b"X\1\0\0\0000", b"X\1\0\0\0a")
    assert journal != content[begin:end]
    rest = content[end:].replace(_C.crc32(content[begin:end]).to_bytes(4, "little"),
                                 _C.crc32(journal).to_bytes(4, "little"))  # fmt: skip
    leftover.write_bytes(content[:begin] + journal + rest)
    damage(leftover, "data/0")
    with pytest.warns(ptsave.CheckpointWarning, match="missing: data/a; without the entries lost"):
        assert list(recovered(leftover)) == ["there"]


def test_a_set_that_holds_itself_cannot_be_written_again() -> None:
    """A pickle of protocol 4 can say that, one of torch's files cannot."""
    made = b"cos\nsystem\n(\x8f\x94tR\x94"  # a call with a set, to which its result is added
    pickle = b"\x80\x04}(X\1\0\0\0k" + made + b"0h\0(h\1\x90X\1\0\0\0l(X\7\0\0\0storage"
    pickle += b"X\1\0\0\0cX\1\0\0\0000X\3\0\0\0cpuK\1tQu."
    with pytest.raises(ValueError, match="a set in the object contains itself"):
        SavedEntries(pickle).without({"0"})


def test_a_damaged_journal_is_named(path: Path) -> None:
    leftover = unfinished(path, ENTRIES)
    damage(leftover, ".journal/1")
    with pytest.warns(ptsave.CheckpointWarning, match=r"added with \.journal/1 are unknown"):
        found = recovered(leftover)
    del found  # of the others
    damage(leftover, ".journal/4")  # the last one, which may as well have never been written
    with pytest.warns(ptsave.CheckpointWarning):
        assert list(recovered(leftover)) == ["a", "view", "empty"]


def test_a_finished_file_without_its_end(path: Path) -> None:
    """Its data.pkl has what a damaged journal had."""
    with ptsave.ArchiveWriter(path) as writer:
        for name, value in ENTRIES.items():
            writer.add(name, value)
            writer.flush()
    path.write_bytes(path.read_bytes()[:-30])
    assert_same_object(recovered(path), ENTRIES)
    damage(path, ".journal/1")
    assert_same_object(recovered(path), ENTRIES)
    damage(path, "data.pkl")
    with pytest.warns(ptsave.CheckpointWarning):
        assert list(recovered(path)) == ["a", "view", "empty", "c"]


def test_an_archive_in_a_damaged_record(path: Path) -> None:
    """Its records are not taken for those of the file."""
    stream = io.BytesIO()
    torch.save({"inner": torch.zeros(100)}, stream)
    with ptsave.ArchiveWriter(path) as inner:
        inner.add("inner", torch.zeros(100))
    values = [torch.frombuffer(stream.getbuffer(), dtype=torch.uint8), torch.ones(3)]
    values.append(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
    entries: dict[str, Any] = {"first": torch.ones(5), **dict(zip("abc", values, strict=True))}
    leftover = unfinished(path, {**entries, "last": torch.ones(4)})
    content = leftover.read_bytes()
    for record in records_of(content):
        if record.nbytes > 600:
            damaged = bytearray(content)
            damaged[record.header_offset + 30] ^= 1  # its name
            damaged[record.payload_offset - 1] ^= 1
            damaged[record.end - 5] ^= 1  # its size
            with (
                pytest.warns(ptsave.CheckpointWarning, match=record.name),
                ptsave.open(io.BytesIO(damaged), recover=True) as archive,
            ):
                found = {name: archive[name] for name in archive}
            assert "inner" not in found
            assert len(found) == 4
            assert_same_object(found["last"], torch.ones(4))


def test_a_file_that_becomes_shorter(path: Path) -> None:
    """It is an error, and no signal, as it would be if the file were mapped."""
    leftover = unfinished(path, {"a": torch.ones(20 * MIB)})
    with leftover.open("rb") as stream:
        source = LocalFile(stream, "run.pt")
        os.truncate(leftover, 4 * MIB)
        with pytest.raises(OSError, match="the file has changed"):
            CutArchive(source)


@pytest.mark.parametrize("step", [4, 30, 34])
def test_a_file_of_signatures_takes_little_memory(step: int) -> None:
    """Each header is followed by others, in what it calls its name."""
    header = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 8, 0, 0, 0, 0, 0, 0, 0xFF00, 0)
    content = (header + b"name")[:step] * (218_000 // step)
    tracemalloc.start()
    try:
        found = CutArchive(Buffer(io.BytesIO(content), "hostile"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20
    assert sum(len(record.name) for record in found.records) <= len(content)


def test_hostile_journals() -> None:
    """A journal has no more power than a data.pkl."""
    evil = b"\x80\x02}q\x00cos\nsystem\nX\x04\0\0\0true\x85R."
    name = b"run/.journal/0"
    header = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(name), 0)
    descriptor = struct.pack("<4sIII", b"PK\7\x08", _C.crc32(evil), len(evil), len(evil))
    body = header + name + evil + descriptor
    with ptsave.open(io.BytesIO(body), recover=True) as archive:
        assert archive._contents.obj.type_name in ("os.system", "posix.system")  # and not called


def keep_adding(path: Path, seed: int) -> NoReturn:
    generator = torch.Generator().manual_seed(seed)
    writer = ptsave.ArchiveWriter(path, fsync=seed % 2 == 0)
    i = 0
    shared = torch.arange(1000)
    while True:
        size = int(torch.randint(1, 400_000, (), generator=generator))
        writer.add_group({f"{i}/full": torch.full((size,), i), f"{i}/shared": shared[i % 900 :]})
        if i % 7 == 0:
            writer.flush()
        i += 1


@pytest.mark.timeout(0)
def test_kill(tmp_path: Path) -> None:
    generator = random.Random(SEED)
    n_entries = 0
    for i in range(max(ROUNDS // 5, 1)):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        path = folder / "run.pt"
        child = Child(functools.partial(keep_adding, path, i))
        time.sleep(generator.uniform(0.05, 0.6))
        child.kill()
        for leftover in folder.iterdir():
            if leftover.stat().st_size == 0:
                continue
            try:
                entries = recovered(leftover)
            except ptsave.CorruptCheckpointError:
                continue  # not one batch was whole
            assert len(entries) % 2 == 0
            for k, name in enumerate(entries):
                number = int(name.partition("/")[0])
                assert number == k // 2
                if name.endswith("full"):
                    assert (entries[name] == number).all()
                else:
                    assert torch.equal(entries[name], torch.arange(number % 900, 1000))
            n_entries += len(entries)
    assert n_entries > 0


def test_leftovers_stay_until_the_next_archive_is_complete(path: Path) -> None:
    unfinished(path, ENTRIES)
    writer = ptsave.ArchiveWriter(path)
    assert len(list(path.parent.iterdir())) == 2
    writer.add("new", 1)
    writer.close()
    assert os.listdir(path.parent) == ["run.pt"]


# ------------------------------------------------------------------------------------------- forks


def test_a_forked_child_leaves_it_to_the_parent(path: Path) -> None:
    writer = ptsave.ArchiveWriter(path)
    writer.add("before", torch.ones(MIB))

    def child() -> None:
        for call in (
            lambda: writer.add("child", 1),
            writer.flush,
            writer.close,
            writer.abort,
            writer.forget_storages,
        ):
            with pytest.raises(RuntimeError, match="forked while the archive"):
                call()
        with ptsave.ArchiveWriter(path.with_name("child.pt")) as own:
            own.add("child", torch.ones(3))

    in_child(child)
    gc.collect()
    writer.add("after", torch.ones(3))
    writer.close()
    assert list(torch.load(path)) == ["before", "after"]
    assert list(torch.load(path.with_name("child.pt"))) == ["child"]


def test_forks_at_any_moment(path: Path) -> None:
    with ptsave.ArchiveWriter(path) as writer:
        children = []
        for i in range(20):
            writer.add(f"{i}", torch.full((100_000,), i))
            children.append(Child(lambda: None))
        for child in children:
            child.join()
    assert [each[-1].item() for each in torch.load(path).values()] == list(range(20))


# -------------------------------------------------------------------------------------------- exit


@pytest.mark.parametrize("status", [0, 3])
def test_exit_closes(path: Path, status: int) -> None:
    code = f"""
import sys, torch, ptsave
writer = ptsave.ArchiveWriter(sys.argv[1])
writer.add("a", torch.ones(3))
writer.add_group({{"b": 1}})
sys.exit({status})
"""
    assert run_python(code, path, status=status).stderr == ""
    assert list(torch.load(path)) == ["a", "b"]
    assert os.listdir(path.parent) == ["run.pt"]


# ------------------------------------------------------------------------------------------ errors


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "none") as disk:
        yield disk


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "run.pt"
    writer = ptsave.ArchiveWriter(path)
    writer.add("first", torch.ones(1000))
    writer.flush()
    writer.add("second", torch.ones(2 * MIB))
    with pytest.raises(ptsave.SaveError, match=r"No space left on device.*recover=True") as caught:
        writer.flush()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(ptsave.SaveError) as again:
        writer.add("third", 3)
    assert again.value is caught.value
    with pytest.raises(ptsave.SaveError):
        writer.close()
    assert writer.closed
    assert not path.exists()
    assert background._budget._held == {}
    assert_same_object(recovered(leftover_of(path)), {"first": torch.ones(1000)})


def test_a_full_disk_before_anything_is_finished(small_disk: Path) -> None:
    path = small_disk / "run.pt"

    def program() -> None:
        with ptsave.ArchiveWriter(path) as writer:
            writer.add("only", torch.ones(2 * MIB))
            writer.flush()

    with pytest.raises(ptsave.SaveError, match="none of the entries could be kept") as caught:
        program()
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == []
    with ptsave.ArchiveWriter(path) as writer:  # there is room for others
        writer.add("small", 1)
    assert torch.load(path) == {"small": 1}


def test_a_full_disk_has_the_first_entries_of_a_batch(small_disk: Path) -> None:
    path = small_disk / "run.pt"
    entries = {f"{i}": torch.full((MIB // 5,), float(i)) for i in range(10)}
    writer = ptsave.ArchiveWriter(path)
    for name, tensor in entries.items():
        writer.add(name, tensor)
    with pytest.raises(ptsave.SaveError, match="recover=True") as caught:
        writer.close()
    leftover = leftover_of(path)
    assert str(leftover) in str(caught.value)
    assert_same_object(recovered(leftover), {name: entries[name] for name in [*entries][:4]})


def test_a_file_that_may_not_grow_has_the_first_entries_of_a_batch(path: Path) -> None:
    """The system tells of no such limit, nor of quotas: half as many are tried, and so on."""
    entries = {f"{i}": torch.full((1000,), float(i)) for i in range(16)}

    def program() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        writer = ptsave.ArchiveWriter(path)
        for name, tensor in entries.items():
            writer.add(name, tensor)
        with pytest.raises(ptsave.SaveError, match=r"File too large.*recover=True"):
            writer.close()

    in_child(program)
    found = recovered(leftover_of(path))
    assert_same_object(found, {name: entries[name] for name in [*entries][:8]})


def test_a_full_disk_while_others_wait_for_room(small_disk: Path) -> None:
    path = small_disk / "run.pt"

    def program() -> None:
        with ptsave.ArchiveWriter(path, max_memory_bytes=3 * MIB) as writer:
            for i in range(100):
                writer.add(f"{i}", torch.full((MIB // 4,), float(i)))

    with pytest.raises(ptsave.SaveError) as caught:
        program()
    assert caught.value.errno == errno.ENOSPC
    assert background._budget._held == {}
    entries = recovered(leftover_of(path))
    assert 0 < len(entries) < 4
    assert all(torch.equal(entries[name], torch.full((MIB // 4,), float(name))) for name in entries)


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    writer = ptsave.ArchiveWriter(folder / "run.pt")
    writer.add("a", torch.ones(3))
    writer.flush()
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        writer.close()
    assert writer.closed


def test_the_target_becomes_a_directory(path: Path) -> None:
    writer = ptsave.ArchiveWriter(path)
    writer.add("a", torch.ones(3))
    path.mkdir()
    with pytest.raises(ptsave.SaveError, match="recover=True"):
        writer.close()
    assert_same_object(recovered(leftover_of(path)), {"a": torch.ones(3)})
