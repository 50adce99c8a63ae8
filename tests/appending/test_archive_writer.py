"""`ArchiveWriter`: the file is that of a dict, with the values of the calls."""

from __future__ import annotations

import io
import os
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from _pickling import PICKLED, QUIET, Factory
from _system import Child, in_threads
from hypothesis import given
from hypothesis import strategies as st
from stock_comparison import assert_same_object, saved_bytes

import ptsave
from ptsave.appending import archive_writer
from ptsave.background import saves as background

pytestmark = [*QUIET, pytest.mark.usefixtures("_everything_ends")]


MIB = 1 << 20


def storages_in(path: Path) -> int:
    """Return how many storages a file has."""
    with zipfile.ZipFile(path) as file:
        return sum("/data/" in name for name in file.namelist())


def written(path: Path, entries: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Add entries one by one; returns what torch loads from the file."""
    with ptsave.ArchiveWriter(path, **options) as writer:
        for name, value in entries.items():
            assert writer.add(name, value) is True
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    assert list(loaded) == list(entries)
    return loaded


# ------------------------------------------------------------------------------------------ values


VALUES: dict[str, Factory] = {
    **PICKLED,
    "channels_last": lambda: torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(1, 3).expand(5, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8),
    "buffer": lambda: torch.nn.Buffer(torch.randn(2)),
    "large": lambda: torch.randn(3 * MIB),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize")
@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(path: Path, name: str) -> None:
    """As torch loads what torch saves, which makes other objects of some, such as storages."""
    value = VALUES[name]()
    loaded = written(path, {name: value})
    stock = io.BytesIO(saved_bytes(torch.save, value))
    assert_same_object(loaded[name], torch.load(stock, weights_only=False))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize")
def test_all_values_in_one_file(path: Path, tmp_path: Path) -> None:
    values = {name: make() for name, make in VALUES.items()}
    loaded = written(path, values)
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"]
    assert zipfile.ZipFile(path).testzip() is None
    stock = tmp_path / "stock.pt"
    torch.save(values, stock)
    assert_same_object(loaded, torch.load(stock, weights_only=False))


def test_plain_values_need_no_trust(path: Path) -> None:
    entries = {str(i): torch.full((3,), i) for i in range(600)}
    written(path, entries)
    assert_same_object(torch.load(path, weights_only=True), entries)
    assert_same_object(torch.load(path, weights_only=True, mmap=True), entries)
    assert_same_object(ptsave.load(path), entries)
    with ptsave.open(path) as archive:
        assert archive.keys() == list(entries)
        archive.verify()
        assert_same_object(archive["599"], entries["599"])


class Thing:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


class Subclass(torch.Tensor):
    pass


def test_objects(path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    subclass = torch.ones(3).as_subclass(Subclass)
    loaded = written(path, {"thing": Thing(torch.ones(2)), "module": module, "sub": subclass})
    assert loaded["thing"] == Thing(torch.ones(2))
    assert torch.equal(loaded["module"].weight, module.weight)
    assert type(loaded["sub"]) is Subclass
    assert torch.equal(loaded["sub"], subclass)


def test_an_archive_without_entries(path: Path) -> None:
    assert written(path, {}) == {}


NAMES = st.text(max_size=20)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(torch.arange, st.integers(0, 50)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


@given(groups=st.lists(st.dictionaries(NAMES, PLAIN, max_size=4), max_size=6))
def test_any_groups(path: Path, groups: list[dict[str, Any]]) -> None:
    entries: dict[str, Any] = {}
    with ptsave.ArchiveWriter(path) as writer:
        for i, group in enumerate(groups):
            named = {f"{i}/{name}": value for name, value in group.items()}
            writer.add_group(named)
            entries.update(named)
    assert_same_object(torch.load(path, weights_only=False), entries)


# ----------------------------------------------------------------------------------------- sharing


def test_a_storage_is_written_once(path: Path) -> None:
    base = torch.arange(12.0)
    entries = {"base": base, "view": base.view(3, 4).t(), "part": base[3:7], "again": base.detach()}
    loaded = written(path, entries)
    assert storages_in(path) == 1
    assert_same_object(loaded, entries)
    assert len({each.untyped_storage().data_ptr() for each in loaded.values()}) == 1


def test_a_changed_storage_is_written_again(path: Path) -> None:
    tensor = torch.zeros(3)
    with ptsave.ArchiveWriter(path) as writer:
        for i in range(4):
            writer.add(f"{i}", tensor)
            writer.add(f"{i}/detached", tensor.detach())
            tensor += 1
    loaded = torch.load(path)
    assert [each[0].item() for each in loaded.values()] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert storages_in(path) == 4


def test_memory_that_is_used_again_is_no_shared_storage(path: Path) -> None:
    with ptsave.ArchiveWriter(path) as writer:
        for i in range(200):
            writer.add(f"{i}", torch.full((256,), i))
    assert [each[0].item() for each in torch.load(path).values()] == list(range(200))


def test_other_versions_and_dtypes_are_no_shared_storage(path: Path) -> None:
    tensor = torch.zeros(4)
    with ptsave.ArchiveWriter(path) as writer:
        writer.add("zeros", tensor)
        tensor.data.fill_(1)  # with a count of its own, which the copy has
        writer.add("data", tensor.data)
        writer.add("int", tensor.view(torch.int32))
        with torch.inference_mode():
            inference = torch.zeros(4)
            writer.add("inference 0", inference)
            inference += 1
            writer.add("inference 1", inference)
    loaded = torch.load(path)
    assert loaded["data"].tolist() == [1] * 4
    assert_same_object(loaded["int"], tensor.view(torch.int32))
    assert loaded["inference 0"].tolist() == [0] * 4
    assert loaded["inference 1"].tolist() == [1] * 4


def test_forget_storages(path: Path) -> None:
    tensor = torch.zeros(4)
    with ptsave.ArchiveWriter(path) as writer:
        writer.add("a", tensor)
        tensor.data.fill_(1)
        writer.forget_storages()
        writer.add("b", tensor)
    loaded = torch.load(path)
    assert (loaded["a"][0], loaded["b"][0]) == (0, 1)


def test_an_entry_that_fails_leaves_no_storage_behind(path: Path) -> None:
    tensor = torch.ones(3)
    with ptsave.ArchiveWriter(path) as writer:
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            writer.add("bad", [tensor, lambda: None])
        writer.add("good", tensor)
        assert writer.n_entries == 1
    loaded = torch.load(path)
    assert list(loaded) == ["good"]
    assert loaded["good"].tolist() == [1] * 3


def test_groups_keep_what_their_objects_share(path: Path) -> None:
    shared = [torch.ones(2)]
    with ptsave.ArchiveWriter(path) as writer:
        writer.add_group({"a": shared, "b": shared})
        writer.add("c", shared)
    loaded = torch.load(path)
    assert loaded["a"] is loaded["b"]
    assert storages_in(path) == 1


# -------------------------------------------------------------------------------------- the call


def test_values_are_those_of_the_call(path: Path) -> None:
    tensors = [torch.zeros(MIB // 4) for _ in range(32)]
    values = {"list": [1]}
    with ptsave.ArchiveWriter(path) as writer:
        writer.add("plain", values)
        values["list"].append(2)
        for i, tensor in enumerate(tensors):
            writer.add(f"{i}", tensor)
            tensor.fill_(i + 1)
    loaded = torch.load(path)
    assert loaded["plain"] == {"list": [1]}
    assert all(not loaded[f"{i}"].any() for i in range(32))


def test_without_a_copy_the_tensor_is_kept(path: Path) -> None:
    with ptsave.ArchiveWriter(path) as writer:
        for i in range(50):
            writer.add(f"{i}", torch.full((1000,), i), copy=False)
    assert [each[0].item() for each in torch.load(path).values()] == list(range(50))


def test_names(path: Path) -> None:
    with ptsave.ArchiveWriter(path) as writer:
        writer.add("a", 1)
        with pytest.raises(ValueError, match=r"run\.pt: there is an entry 'a' already"):
            writer.add("a", 2)
        with pytest.raises(ValueError, match="'a' already"):
            writer.add_group({"b": 1, "a": 2})
        with pytest.raises(TypeError, match="must be a str, not int"):
            writer.add(1, 2)  # type: ignore[arg-type]
        writer.add("b", 3)
    assert torch.load(path) == {"a": 1, "b": 3}


def test_readers_see_nothing_until_it_is_closed(path: Path) -> None:
    torch.save("old", path)
    writer = ptsave.ArchiveWriter(path, fsync=True)
    writer.add("a", torch.ones(3))
    writer.flush()
    assert writer.nbytes > 12
    assert torch.load(path) == "old"
    writer.close()
    writer.close()
    assert list(torch.load(path)) == ["a"]
    assert writer.closed
    for call in (writer.flush, lambda: writer.add("b", 1), writer.__enter__):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_abort(path: Path, tmp_path: Path) -> None:
    torch.save("old", path)
    writer = ptsave.ArchiveWriter(path)
    writer.add("a", torch.ones(3))
    writer.abort()
    writer.abort()
    assert torch.load(path) == "old"
    assert os.listdir(tmp_path) == ["run.pt"]


def test_an_exception_keeps_what_was_added(path: Path) -> None:
    def program() -> None:
        with ptsave.ArchiveWriter(path) as writer:
            writer.add("a", 1)
            raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"):
        program()
    assert torch.load(path) == {"a": 1}


def test_threads(path: Path) -> None:
    with ptsave.ArchiveWriter(path, max_memory_bytes=MIB) as writer:

        def add_all(thread: int) -> None:
            for i in range(50):
                writer.add(f"{thread}/{i}", torch.full((1000,), 100 * thread + i))

        in_threads(add_all, range(8))
    loaded = torch.load(path)
    assert len(loaded) == 400
    for name, tensor in loaded.items():
        thread, i = map(int, name.split("/"))
        assert tensor.tolist() == [100 * thread + i] * 1000


def test_a_group_is_a_mapping(path: Path) -> None:
    with ptsave.ArchiveWriter(path) as writer:
        for wrong in (5, ["a"], None):
            with pytest.raises(TypeError, match="entries must be a mapping of names to values"):
                writer.add_group(wrong)  # type: ignore[arg-type]
        writer.add_group(MappingProxyType({"a": 1}))
    assert torch.load(path) == {"a": 1}


def test_arguments(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with pytest.raises(ValueError, match="when_full must be"):
        ptsave.ArchiveWriter(path, when_full="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be negative"):
        ptsave.ArchiveWriter(path, max_memory_bytes=-1)
    with pytest.raises(TypeError, match="path must be a str"):
        ptsave.ArchiveWriter(3)  # type: ignore[arg-type]
    with pytest.raises(ptsave.UnsupportedUrlError):
        ptsave.ArchiveWriter("memory://run.pt")
    with pytest.raises(ptsave.SaveError, match="does not exist"):
        ptsave.ArchiveWriter(tmp_path / "no" / "run.pt")
    with pytest.raises(IsADirectoryError):
        ptsave.ArchiveWriter(tmp_path)
    with pytest.raises(ptsave.SaveError, match="not a regular file"):
        ptsave.ArchiveWriter("/dev/null")
    assert os.listdir(tmp_path) == []


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "run.pt", tmp_path / "link.pt"
    link.symlink_to(target)
    written(link, {"a": 1})
    assert link.is_symlink()
    assert torch.load(target) == {"a": 1}


def test_direct_writes(path: Path) -> None:
    entries = {f"{i}": torch.randn(MIB + 12345 * i) for i in range(12)}
    loaded = {}
    with ptsave.ArchiveWriter(path, fsync=True) as writer:
        for name, value in entries.items():
            writer.add_group({name: value, f"{name}/small": 1})
            if name in "37":
                writer.flush()
        writer.flush()
    loaded = torch.load(path)
    for name, value in entries.items():
        assert torch.equal(loaded[name], value)
    assert zipfile.ZipFile(path).testzip() is None


# --------------------------------------------------------------------------------------- memory


def test_a_budget_that_waits(path: Path) -> None:
    entries = {f"{i}": torch.full((MIB // 4,), float(i)) for i in range(20)}
    with ptsave.ArchiveWriter(path, max_memory_bytes=2 * MIB) as writer:
        for name, value in entries.items():
            assert writer.add(name, value)
            assert sum(background._budget._held.values()) <= 2 * MIB
    assert_same_object(torch.load(path), entries)
    with ptsave.ArchiveWriter(path, max_memory_bytes=MIB) as writer:
        with pytest.raises(ptsave.StagingFullError):
            writer.add("too large", torch.ones(MIB))
        writer.add("small", 1)
    assert torch.load(path) == {"small": 1}


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold up writing until the event is set."""
    event = threading.Event()
    write = archive_writer.ArchiveWriter._write

    def wait(self: Any, batch: Any) -> None:
        assert event.wait(20)
        write(self, batch)

    monkeypatch.setattr(archive_writer.ArchiveWriter, "_write", wait)
    yield event
    event.set()


def test_a_budget_that_drops(path: Path, blocked: threading.Event) -> None:
    tensor = torch.ones(MIB // 4)
    with ptsave.ArchiveWriter(path, max_memory_bytes=2 * MIB, when_full="drop") as writer:
        assert writer.add("first", torch.ones(MIB // 4))
        assert not writer.add_group({"dropped": tensor, "too": 1, "many": torch.ones(MIB // 4)})
        assert writer.add("second", 2)
        blocked.set()
        writer.flush()
        assert writer.add("third", tensor)
        assert writer.n_entries == 3
    loaded = torch.load(path)
    assert list(loaded) == ["first", "second", "third"]
    assert torch.equal(loaded["third"], tensor)


def test_a_budget_that_raises(path: Path, blocked: threading.Event) -> None:
    with ptsave.ArchiveWriter(path, max_memory_bytes=2 * MIB, when_full="raise") as writer:
        writer.add("first", torch.ones(MIB // 4))
        with pytest.raises(ptsave.StagingFullError):
            writer.add("second", torch.ones(MIB // 2))
        blocked.set()
    assert list(torch.load(path)) == ["first"]


def test_large_copies_have_whole_blocks(tmp_path: Path) -> None:
    """So that the disk takes them from where they are, whatever was added before them."""
    path = tmp_path / "run.pt"
    sizes = [3, 1 << 18, 17, (1 << 20) + 5, 1 << 16, (3 << 20) + 1]
    with ptsave.ArchiveWriter(path, fsync=True) as writer:
        for i, size in enumerate(sizes):
            writer.add(f"{i}", torch.arange(size, dtype=torch.int32).to(torch.uint8))
            if i % 2:
                writer.flush()
    found = torch.load(path)
    with zipfile.ZipFile(path) as archive:
        for i, size in enumerate(sizes):
            assert torch.equal(found[f"{i}"], torch.arange(size, dtype=torch.int32).to(torch.uint8))
            record = archive.getinfo(f"run/data/{i}")
            with path.open("rb") as file:
                file.seek(record.header_offset + 26)
                n_name, n_extra = struct.unpack("<HH", file.read(4))
            start = record.header_offset + 30 + n_name + n_extra
            assert start % (4096 if size >= 256 << 10 else 64) == 0
    assert_same_object(ptsave.load(path), found)


# ---------------------------------------------------------------------- several writers of one path


N_ENTRIES = 30


def entries_of(number: int) -> dict[str, Any]:
    return {f"{number}/{i}": torch.full((10_000 + i,), number) for i in range(N_ENTRIES)}


def write(path: Path, number: int) -> None:
    with ptsave.ArchiveWriter(path) as writer:
        for name, value in entries_of(number).items():
            writer.add(name, value)
            if len(name) % 2:
                writer.flush()


def assert_one_of(path: Path, n: int) -> None:
    """Check that the file is that of one of the writers, whole, and that nothing is beside it."""
    found = torch.load(path)
    number = int(next(iter(found)).partition("/")[0])
    assert number in range(n)
    assert_same_object(found, entries_of(number))
    assert os.listdir(path.parent) == [path.name]


def test_the_last_close_wins(path: Path) -> None:
    first, second = ptsave.ArchiveWriter(path), ptsave.ArchiveWriter(path)
    first.add_group(entries_of(0))
    second.add_group(entries_of(1))
    second.close()
    assert_same_object(torch.load(path), entries_of(1))
    first.add("more", 1)  # it is whole, and has not lost its own file
    first.close()
    assert_same_object(torch.load(path), {**entries_of(0), "more": 1})
    assert os.listdir(path.parent) == [path.name]


def test_threads_with_writers_of_their_own(path: Path) -> None:
    in_threads(lambda number: write(path, number), range(4))
    assert_one_of(path, 4)


def test_processes(path: Path) -> None:
    def work(number: int) -> None:
        for _ in range(3):
            write(path, number)

    children = [Child(lambda number=number: work(number)) for number in range(3)]  # type: ignore[misc]
    for child in children:
        child.join()
    assert_one_of(path, 3)


def test_beside_saves(path: Path) -> None:
    """A save to the path does not take the temporary file of a writer that lives."""
    with ptsave.ArchiveWriter(path) as writer:
        writer.add_group(entries_of(0))
        writer.flush()
        ptsave.save({"saved": 1}, path)
        ptsave.async_save({"saved": 2}, path).result()
        assert torch.load(path) == {"saved": 2}
    assert_one_of(path, 1)


@pytest.mark.parametrize("copy", [False, True])
def test_entries_from_the_file_that_it_replaces(path: Path, copy: bool) -> None:
    """Mapped tensors keep their values: the old file lives as long as they do."""
    entries = entries_of(0)
    torch.save(entries, path)
    mapped = ptsave.load(path, mmap=True)
    with ptsave.open(path) as archive, ptsave.ArchiveWriter(path) as writer:
        for name, value in mapped.items():
            writer.add(name, value, copy=copy)
        writer.add("again", archive[next(iter(entries))])
        writer.add("grown", torch.ones(3))
    found = torch.load(path)
    assert_same_object(found.pop("grown"), torch.ones(3))
    assert_same_object(found.pop("again"), next(iter(entries.values())))
    assert_same_object(found, entries)
    assert_same_object(mapped, entries)
    assert os.listdir(path.parent) == [path.name]
