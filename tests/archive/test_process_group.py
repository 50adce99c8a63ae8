"""`process_group=`: one rank reads a file, all ranks of the group have what it holds."""

from __future__ import annotations

import os
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from forked_ranks import ForkedRanks, fail_read
from stock_comparison import assert_same_object, failure_of, saved_bytes, zip_records, zipped
from torch import distributed

import ptsave
from ptsave.archive import group_archive

CHUNK_NBYTES = 1 << 14
MIB = 1 << 20


class Looking:
    """An object that looks at a tensor's values while it is unpickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.total = float(tensor.sum())

    def __reduce__(self) -> Any:
        return Looking, (self.tensor,)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_archive, "CHUNK_NBYTES", CHUNK_NBYTES)


def _state() -> dict[str, Any]:
    matrix = torch.randn(130, 129)  # of five chunks
    return {
        "matrix": matrix,
        "transposed": matrix.t(),
        "row": matrix[3],
        "empty": torch.empty(0, 3),
        "half": torch.randn(4000).half(),
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "sparse": torch.eye(4).to_sparse(),
        **{f"small{i}": torch.full((i,), float(i)) for i in range(40)},
        "words": ["epoch", 3],
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_what_torch_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path, objects = tmp_path / "a.pt", tmp_path / "objects.pt"
    torch.save(_state(), path)
    torch.save([Looking(torch.arange(9000.0))], objects)

    def load(rank: int) -> None:
        group = distributed.group.WORLD
        if rank > 0:  # which have no file
            monkeypatch.setattr(group_archive, "open_source", None)
        loaded, stock = ptsave.load(path, process_group=group), torch.load(path)
        assert_same_object(loaded, stock)
        matrix = loaded["matrix"].untyped_storage()
        assert loaded["row"].untyped_storage().data_ptr() == matrix.data_ptr()
        matrix.resize_(4)
        # Each rank's own options: one sees each storage, others load what looks at values.
        seen: list[str] = []

        def see(storage: Any, location: str) -> Any:
            seen.append(location)
            assert storage.nbytes() != 130 * 129 * 4 or any(storage[:64])
            return storage

        where = [see, None, "meta", {"cpu": "cpu"}][rank]
        loaded = ptsave.load(str(path), where, process_group=group)
        assert (where is see) == bool(seen)
        if where == "meta":
            assert loaded["matrix"].is_meta
        else:
            assert_same_object(loaded, stock)
        (looking,) = ptsave.load(objects, weights_only=False, process_group=group)
        assert looking.total == 8999 * 4500

    ForkedRanks(tmp_path, load, size).join()


def test_other_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "swapped.pt"
    records = zip_records(saved_bytes(torch.save, {"a": torch.arange(5000)}))
    (name,) = (name for name in records if name.endswith("byteorder"))
    path.write_bytes(zipped({**records, name: b"big" if sys.byteorder == "little" else b"little"}))

    def load(rank: int) -> None:
        loaded = ptsave.load(path, process_group=distributed.group.WORLD)
        assert_same_object(loaded, torch.load(path))

    ForkedRanks(tmp_path, load).join()


def test_damage_is_an_error_on_every_rank(tmp_path: Path) -> None:
    state = {"large": torch.zeros(9000), "small": torch.ones(50)}
    for name in state:
        torch.save(state, tmp_path / f"{name}.pt")
        flip_middle(tmp_path / f"{name}.pt", f"data/{[*state].index(name)}")

    def load(rank: int) -> None:
        group = distributed.group.WORLD
        for name in state:
            load = partial(ptsave.load, tmp_path / f"{name}.pt", process_group=group)
            error = failure_of(load)
            assert isinstance(error, ptsave.CorruptCheckpointError)
            assert error.entries == [name]
            assert f"{name}.pt" in str(error)
        loaded = ptsave.load(tmp_path / "small.pt", verify=False, process_group=group)
        assert loaded["large"].eq(0).all()

    ForkedRanks(tmp_path, load).join()


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(9000), "b": Looking(torch.ones(3))}, path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.pt").write_text("<!DOCTYPE html><title>404</title>")
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)

    def load(rank: int) -> None:
        group = distributed.group.WORLD

        def refused(f: Any, kind: type[Exception], words: str, **options: Any) -> None:
            options.setdefault("process_group", group)
            with pytest.raises(kind, match=words):
                ptsave.load(f, **options)

        missing = tmp_path / "missing.pt"
        refused(missing, FileNotFoundError, str(missing))
        refused(tmp_path / "folder", IsADirectoryError, r"load_model\(process_group.*folder")
        refused(tmp_path / "text.pt", ValueError, "text.pt.*without process_group")
        refused(tmp_path / "old.pt", ValueError, "old.pt.*without process_group")
        refused(path if rank else open(path, "rb"), ValueError, "pass the same path")
        refused([path, missing][rank], ValueError, "different files: rank 1 for .*missing")
        on_one = "" if rank == 1 else "rank 1 of 2.*"
        refused(path, ValueError, f"{on_one}mmap=True maps", weights_only=False, mmap=rank == 1)
        error = pickle.UnpicklingError
        refused(path, error, f"{on_one}Weights only load failed", weights_only=rank == 1)
        assert ptsave.load(path, weights_only=False, process_group=group)["a"].sum() == 9000
        pair = distributed.new_group([0])
        if rank == 0:
            assert ptsave.load(path, weights_only=False, process_group=pair)["a"].sum() == 9000
        else:
            refused(path, ValueError, "not in process_group", process_group=pair)
        words = "must be a torch.distributed.ProcessGroup"
        refused(path, TypeError, words, process_group="gloo")
        pair = distributed.new_group([0, 1])
        distributed.destroy_process_group(pair)
        refused(path, RuntimeError, "has been destroyed", process_group=pair)

    with pytest.raises(RuntimeError, match="init_process_group"):
        ptsave.load(path, process_group=3)
    ForkedRanks(tmp_path, load).join()


def test_read_error_halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(50_000)}, path)
    fail_read(monkeypatch, 5, path)

    def load(rank: int) -> None:
        error = failure_of(lambda: ptsave.load(path, process_group=distributed.group.WORLD))
        assert isinstance(error, OSError)
        assert (error.errno, error.filename) == (5, str(path))
        assert rank == 0 or "rank 0 of 2" in str(error)
        assert ptsave.load(path, process_group=distributed.group.WORLD)["a"].sum() == 50_000

    ForkedRanks(tmp_path, load).join()


def test_a_group_for_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a host have a group of their own, whose first rank reads for them."""
    path = tmp_path / "a.pt"
    torch.save(_state(), path)

    def load(rank: int) -> None:
        host, _ = distributed.new_subgroups(2)
        if rank in {1, 3}:
            monkeypatch.setattr(group_archive, "open_source", None)
        target = {"matrix": torch.zeros(130, 129)}
        loaded = ptsave.load(path, process_group=host)
        assert_same_object(loaded, torch.load(path))
        ptsave.load_into(path, target, process_group=host, strict=False)
        assert torch.equal(target["matrix"], loaded["matrix"])

    ForkedRanks(tmp_path, load, 4).join()


def test_a_url(tmp_path: Path) -> None:
    """One rank fetches it."""
    fsspec = pytest.importorskip("fsspec")
    url = "memory://test_process_group/a.pt"
    torch.save(_state(), tmp_path / "a.pt")
    with fsspec.open(url, "wb") as stream:
        stream.write((tmp_path / "a.pt").read_bytes())

    def load(rank: int) -> None:
        if rank:
            fsspec.filesystem("memory").rm(url)  # of this process's memory
        for _ in range(2):
            loaded = ptsave.load(url, process_group=distributed.group.WORLD)
            assert_same_object(loaded, torch.load(tmp_path / "a.pt"))
        target = {"matrix": torch.zeros(130, 129)}
        ptsave.load_into(url, target, process_group=distributed.group.WORLD, strict=False)
        assert torch.equal(target["matrix"], loaded["matrix"])

    ForkedRanks(tmp_path, load).join()
    fsspec.filesystem("memory").rm(url)


def test_a_rank_that_ends_is_no_hang(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(50_000)}, path)

    def load(rank: int) -> None:
        class Last:
            def __call__(self, storage: Any, location: str) -> Any:
                os._exit(0)

        if rank == 0:
            ptsave.load(path, Last(), process_group=distributed.group.WORLD)
        error = failure_of(lambda: ptsave.load(path, process_group=distributed.group.WORLD))
        assert str(path) in str(error)
        assert "rank 1 of 2" in str(error)
        os._exit(0)  # the group cannot be ended any more

    ForkedRanks(tmp_path, load).join()


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_archive, "CHUNK_NBYTES", 8 * MIB)
    path = tmp_path / "a.pt"
    torch.save(
        {"large": torch.zeros(24 * MIB), **{str(i): torch.ones(MIB) for i in range(24)}}, path
    )

    def peak() -> int:
        words = Path("/proc/self/status").read_text().split()
        return int(words[words.index("VmHWM:") + 1]) << 10

    def load(rank: int) -> None:
        ptsave.load(path, process_group=distributed.group.WORLD, map_location="meta")
        Path("/proc/self/clear_refs").write_text("5")  # begins to count anew
        before = peak()
        loaded = ptsave.load(path, process_group=distributed.group.WORLD)
        assert loaded["large"][-1] == 0
        assert peak() - before <= path.stat().st_size + 64 * MIB

    ForkedRanks(tmp_path, load).join()
