"""Several `ArchiveWriter`s of one path, and one whose entries come from the file it replaces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import Child, in_threads
from stock_comparison import assert_same_object

import ptsave

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


def test_threads(path: Path) -> None:
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
