"""The contract of a `Location`, and of a `RangeSource`: the same near and far."""

from __future__ import annotations

import fcntl
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from url_file_systems import GUARDED, MEMORY, PLAIN, TOKEN

import ptsave
from ptsave.archive.opening import open_source_archive, reader_for
from ptsave.archive.reader import RecordReader
from ptsave.archive.remote import RemoteReader
from ptsave.sources.locations import Location, name_for, target_of
from ptsave.sources.ranges import RangeSource, folder_of, open_folder_or_file, open_source
from ptsave.streaming.payload_sources import write_bytes
from ptsave.writing.planning import pickle_object, plan_archive
from ptsave.writing.targets import FileWriter, exists, name_of, resolve, resolve_folder

DATA = bytes(range(256)) * 300
OPTIONS: dict[str, Any] = {GUARDED: TOKEN}
KINDS = ["path", "file", MEMORY, PLAIN, GUARDED]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, _clean_file_systems: None) -> Location:
    """A directory that does not exist."""
    kind = request.param
    name = {"path": f"{tmp_path}/run", "file": f"file://{tmp_path}/run"}.get(
        kind, f"{kind}://a/run"
    )
    return resolve_folder(name, OPTIONS.get(kind))


def failing_write(place: Location, name: str) -> None:
    """Write a file that fails when all of its bytes have been written."""

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    target = place.file(name)
    plan = plan_archive(target, *pickle_object({"w": torch.ones(1 << 16)}, pickle, 2), False)
    writer = FileWriter(plan, compute_crcs=True, fsync=False, atomic=True, progress=fail)
    with pytest.raises(KeyboardInterrupt):
        writer.write_file(target)


def test_directory_that_is_not_there(place: Location) -> None:
    assert place.regular_files() == []
    assert place.bytes_of("a.pt") == b""
    assert not place.is_taken("a.pt")
    place.make()
    place.make()
    place.remove("a.pt")
    assert place.regular_files() == place.files() == place.names() == []


def test_files_are_written_whole_and_removed(place: Location) -> None:
    place.make()
    for data in (DATA, DATA[::-1], b"x"):
        write_bytes(place.file("a.pt"), data, fsync=True)
        place.sync()
        assert place.bytes_of("a.pt") == data
    write_bytes(place.file("b.pt"), b"b")
    assert sorted(place.files()) == sorted(place.regular_files()) == ["a.pt", "b.pt"]
    assert place.names() == ["a.pt", "b.pt"]
    assert place.is_taken("a.pt")
    assert exists(place.file("a.pt"))
    assert place.exists(place.join("a.pt"))
    place.remove("a.pt")
    place.remove("a.pt")
    assert not place.is_taken("a.pt")
    assert not exists(place.file("a.pt"))
    assert place.names() == ["b.pt"]


def test_failed_write_changes_nothing(place: Location) -> None:
    place.make()
    failing_write(place, "a.pt")
    assert place.names() == []
    write_bytes(place.file("a.pt"), DATA)
    failing_write(place, "a.pt")
    assert place.names() == ["a.pt"]
    assert place.bytes_of("a.pt") == DATA


def test_identity_is_of_the_file(place: Location) -> None:
    place.make()
    write_bytes(place.file("a.pt"), DATA)
    first = place.identity("a.pt")
    assert place.identity("a.pt") == first
    write_bytes(place.file("a.pt"), DATA + b"more")
    assert place.identity("a.pt") != first


def test_names_lead_to_files(place: Location) -> None:
    place.make()
    path = place.join("a.pt")
    assert name_of(place.file("a.pt")) == path
    target = resolve(path, place.storage_options)
    write_bytes(target, DATA)
    assert name_of(target) == path
    assert folder_of(path, place.storage_options).path == place.path
    found = open_folder_or_file(place.path, place.storage_options)
    assert isinstance(found, Location)
    assert (found.path, found.names()) == (place.path, ["a.pt"])
    source = open_source(path, place.storage_options)
    assert source.name == path
    assert source.read([(0, 2), (1, 1), (255, 258)]) == [DATA[:2], b"", DATA[255:258]]
    source.close()


def test_subdirectories_are_no_files(place: Location) -> None:
    place.make()
    write_bytes(place.file("a.pt"), DATA)
    inner = resolve_folder(place.join("inner"), place.storage_options)
    inner.make()
    write_bytes(inner.file("b.pt"), DATA)
    assert place.regular_files() == ["a.pt"]
    assert place.names() == ["a.pt", "inner"]


def test_locks_and_leftovers_are_of_local_directories(place: Location) -> None:
    place.make()
    place.check_room(1)
    left = name_for("a.pt")
    assert (target_of(left), target_of("a.pt")) == ("a.pt", "")
    write_bytes(place.file(left), DATA)
    place.remove_leftovers(lambda name: name == "b.pt")
    assert place.names() == [left]
    place.remove_leftovers(lambda name: name == "a.pt")
    assert place.names() == ([left] if place.is_url else [])
    with place.locked() as alone, place.locked() as second:
        assert (alone, second) == (True, place.is_url)
    with place.locked(wait=True) as alone:
        assert alone


def test_leftover_that_is_being_written_stays(tmp_path: Path) -> None:
    left = tmp_path / name_for("a.pt")
    with open(left, "xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        resolve_folder(tmp_path).remove_leftovers(lambda _: True)
        assert left.exists()
    resolve_folder(tmp_path).remove_leftovers(lambda _: True)
    assert not left.exists()


# ------------------------------------------------------------------------------- reading ranges


class Stream(io.BytesIO):
    """A file object that the engine cannot read itself."""


def opened(kind: str, folder: Path, data: bytes) -> tuple[Any, dict[str, Any]]:
    """Return something to open whose bytes are `data`, and its options."""
    path = folder / "a.pt"
    if kind in (MEMORY, PLAIN, GUARDED):
        target = resolve(f"{kind}://a.pt", OPTIONS.get(kind))
        write_bytes(target, data)
        return name_of(target), OPTIONS.get(kind, {})
    path.write_bytes(data if kind == "path" else b"before" + data)
    stream: Any = open(path, "rb") if kind == "file" else Stream(path.read_bytes())
    if kind == "buffer":
        stream = io.BytesIO(path.read_bytes())
    stream.seek(6)
    return (path if kind == "path" else stream), {}


SOURCES = ["path", "file", "buffer", "stream", MEMORY, PLAIN, GUARDED]


@pytest.fixture(params=SOURCES)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, _clean_file_systems: None
) -> Iterator[Callable[[bytes], tuple[Any, dict[str, Any]]]]:
    streams = []

    def made(data: bytes) -> tuple[Any, dict[str, Any]]:
        f, options = opened(request.param, tmp_path, data)
        streams.append(f)
        return f, options

    yield made
    for each in streams:
        if hasattr(each, "close"):
            each.close()


def test_ranges_of_a_source(make: Callable[[bytes], Any]) -> None:
    f, options = make(DATA)
    source = open_source(f, options)
    assert source.nbytes == len(DATA)
    assert source.head == DATA[:512]
    assert source.kind is None
    ranges = [(70_000, 70_010), (0, 3), (2, 5), (7, 7), (0, len(DATA))]
    assert source.read(ranges) == [DATA[begin:end] for begin, end in ranges]
    assert source.read([]) == []
    with source.stream() as stream:
        assert stream.read() == DATA
    with pytest.raises(OSError, match="read 10 bytes of"):
        source.read([(len(DATA) - 10, len(DATA) + 1)])
    source.close()
    if hasattr(f, "tell"):
        assert not f.closed


def test_source_is_closed_on_an_error_only(make: Callable[[bytes], Any]) -> None:
    source = open_source(*make(b""))
    closed: list[RangeSource] = []
    source.close = lambda: closed.append(source)  # type: ignore[method-assign]
    with source.closed_on_error():
        assert (source.head, source.nbytes) == (b"", 0)
    assert closed == []
    with pytest.raises(KeyError), source.closed_on_error():
        raise KeyError
    assert closed == [source]
    del source.close
    source.close()


def test_reader_of_an_archive(make: Callable[[bytes], Any], tmp_path: Path) -> None:
    """The engine reads files and memory itself, and everything else by ranges."""
    ptsave.save({"weight": torch.arange(9)}, tmp_path / "saved.pt")
    f, options = make((tmp_path / "saved.pt").read_bytes())
    is_fetched = isinstance(f, Stream) or bool(options) or "://" in str(f)
    with_engine = open_source_archive(open_source(f, options), verify=True)
    assert type(with_engine) is (RemoteReader if is_fetched else RecordReader)
    assert with_engine.get_record("data/0") == bytes(torch.arange(9).numpy())
    with_engine.close()
    if not isinstance(f, str):
        if hasattr(f, "seek"):
            f.seek(6)
        reader = reader_for(f, False, True)
        assert isinstance(reader, RemoteReader) == is_fetched
        assert reader is not None
        reader.close()
    loaded = ptsave.load(f, storage_options=options)
    assert torch.equal(loaded["weight"], torch.arange(9))
