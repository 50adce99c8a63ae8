"""`process_group=`: one rank reads a file, all ranks of the group have what it holds."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from forked_ranks import ForkedRanks, fail_read
from kill_rounds import ROUNDS, SEED
from stock_comparison import assert_same_object, failure_of, saved_bytes, zip_records, zipped
from torch import distributed, nn

import ptsave
from ptsave.archive import group_archive
from ptsave.archive.group_archive import PART_ALIGNMENT, StorageView, is_viewable
from ptsave.models import group_weights
from ptsave.support import group_call

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
        distributed.barrier()  # a rank that closes the pair must not meet one that still connects
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


# ------------------------------------------------------------------------------------ several hosts


HOSTS = "abab"  # of four ranks
SIZE = 30_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.arange(SIZE), "b": torch.ones(3)}, folder / "model.pt")
    return folder


class Ranks:
    """Runs ranks of pretended hosts, and counts which of them open files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch
        self.opened = 0
        self.opens_instead: Path | None = None

    def run(self, action: Callable[[int], object], hosts: str = HOSTS) -> None:
        def act(rank: int) -> None:
            self._patch.setattr(group_call, "host_identity", lambda: hosts[rank])
            for module, name in ((group_archive, "open_source"), (group_weights, "find_files")):
                self._patch.setattr(module, name, partial(self._open, getattr(module, name)))
            action(rank)

        ForkedRanks(self._folder, act, len(hosts)).join()

    def _open(self, opens: Callable[..., Any], *args: Any) -> Any:
        self.opened += 1
        return opens(self.opens_instead or args[0], *args[1:])


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


@pytest.mark.parametrize("hosts", [HOSTS, "abb", "ab"])
def test_one_rank_of_each_host_reads(folder: Path, ranks: Ranks, hosts: str) -> None:
    path = folder / "model.pt"

    def load(rank: int) -> None:
        group = distributed.group.WORLD
        for _ in range(2):  # the second time over the same group of a host
            assert_same_object(ptsave.load(path, process_group=group), torch.load(path))
        target = {"a": torch.zeros(SIZE).long(), "b": torch.zeros(3)}
        ptsave.load_into(path, target, process_group=group)
        model = nn.ParameterDict({name: torch.zeros_like(t).float() for name, t in target.items()})
        ptsave.load_model(model, folder, process_group=group)
        assert target["a"].sum() == torch.arange(SIZE).sum()
        assert model["a"][-1] == SIZE - 1
        assert ranks.opened == (4 if rank < 2 else 0)
        if len(hosts) == 4:
            made = group_call.host_group(group, [rank % 2, rank % 2 + 2])
            assert group_call.timeout_of_group(made) == group_call.timeout_of_group(group)

    ranks.run(load, hosts)


@pytest.mark.parametrize("why", ["one host", "missing", "other time", "other contents"])
def test_otherwise_one_rank_reads_for_all(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    path = folder / "model.pt"
    hosts = "aaa" if why == "one host" else "aba"

    def load(rank: int) -> None:
        if rank == 1 and why in ("missing", "other time"):
            found = None if why == "missing" else (path.stat().st_size, 3)
            monkeypatch.setattr(group_call, "_identity_of", lambda path: found)
        if rank == 1 and why == "other contents":  # of the same size, and the same time
            own = folder.parent / "own.pt"
            torch.save({"a": torch.arange(SIZE) + 1, "b": torch.ones(3)}, own)
            monkeypatch.setattr(ranks, "opens_instead", own)
        loaded = ptsave.load(path, process_group=distributed.group.WORLD)
        assert_same_object(loaded, torch.load(path))
        assert ranks.opened == int(rank == 0 or (rank == 1 and why == "other contents"))
        model = nn.ParameterDict({"a": torch.zeros(SIZE), "b": torch.zeros(3)})
        ptsave.load_model(model, path, process_group=distributed.group.WORLD)
        assert model["a"][-1] == SIZE - 1

    ranks.run(load, hosts)


def test_what_fails_on_one_host_fails_on_all(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.pt"

    def load(rank: int) -> None:
        if rank == 1:
            fail_read(monkeypatch, 3, path)
        error = failure_of(lambda: ptsave.load(path, process_group=distributed.group.WORLD))
        assert isinstance(error, OSError)
        assert (error.errno, error.filename) == (5, str(path))
        assert rank == 1 or "rank 1 of 4" in str(error)
        loaded = ptsave.load(path, process_group=distributed.group.WORLD)
        assert loaded["a"].sum() == torch.arange(SIZE).sum()

    ranks.run(load)


def test_a_rank_of_another_host_that_ends_is_no_hang(folder: Path, ranks: Ranks) -> None:
    path = folder / "model.pt"

    def load(rank: int) -> None:
        group = distributed.group.WORLD
        ptsave.load(path, process_group=group)
        if rank == 3:
            os._exit(0)
        error = failure_of(lambda: ptsave.load(path, process_group=group))
        assert re.search(rf"{path}: rank {rank} of 4 .*has ended or does not answer", str(error))
        os._exit(0)  # the group cannot be ended any more

    ranks.run(load)


# ------------------------------------------------------------------------- backends without a CPU


def test_a_backend_that_has_only_devices(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks go over memory of the device, for which a subclass stands."""
    path = folder / "model.pt"
    device = torch.device("meta")

    class OnDevice(torch.Tensor):
        """Memory that only this backend has."""

    empty, broadcast, n_sent = torch.empty, distributed.broadcast, 0

    def allocate(*args: Any, **options: Any) -> Any:
        if options.get("device") is not device:
            return empty(*args, **options)
        return empty(*args, **{**options, "device": "cpu"}).as_subclass(OnDevice)

    def send(tensor: Any, *args: Any, **options: Any) -> Any:
        nonlocal n_sent
        if not options.get("async_op"):  # of objects, whose memory torch chooses
            return broadcast(tensor, *args, **options)
        assert isinstance(tensor, OnDevice)
        n_sent += 1
        return broadcast(tensor.as_subclass(torch.Tensor), *args, **options)

    def load(rank: int) -> None:
        monkeypatch.setattr(group_call, "device_of_group", lambda group: device)
        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(distributed, "broadcast", send)
        loaded = ptsave.load(path, process_group=distributed.group.WORLD)
        assert torch.equal(loaded["a"], torch.arange(SIZE))
        assert n_sent >= SIZE * 8 >> 15

    ForkedRanks(tmp_path, load).join()


def test_a_backend_whose_devices_are_not_here(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(rank: int) -> None:
        class Elsewhere:
            _device_types = (torch.device("xpu"),)

        found = group_call.device_of_group
        monkeypatch.setattr(group_call, "device_of_group", lambda group: found(Elsewhere()))
        call = partial(ptsave.load, folder / "model.pt", process_group=distributed.group.WORLD)
        with pytest.raises(RuntimeError, match=r"type xpu, .*new_group\(backend=.gloo.\)"):
            call()

    ForkedRanks(tmp_path, load).join()


def test_ranks_of_a_host_wait_for_data_as_long_as_the_group(tmp_path: Path) -> None:
    """Gloo lets ranks connect for five times the timeout that a group is made with."""

    def act(rank: int) -> None:
        near = group_call.host_group(distributed.group.WORLD, [0, 1])
        assert group_call.timeout_of_group(near) == timedelta(seconds=10)
        if rank == 1:
            time.sleep(6)
        distributed.barrier(near)

    ForkedRanks(tmp_path, act, timeout_s=10).join()


@pytest.mark.parametrize(("timeout", "connecting"), [(1800, 360), (60, 12), (10, 5), (2, 2)])
def test_ranks_of_a_host_connect_within_the_timeout(timeout: int, connecting: int) -> None:
    found = group_call._connecting(timedelta(seconds=timeout))
    assert found == timedelta(seconds=connecting)


# --------------------------------------------------------------------------------- a rank is killed


_TIMEOUT_S = 60.0


def _numbers(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300_000,), value), **{f"b{i}": torch.ones(i) for i in range(30)}}


def _load_for_ever(path: Path, folder: Path, rank: int, size: int) -> None:
    """Load until a rank is gone; of what an error leaves in targets nothing is asked."""
    group = distributed.group.WORLD
    target = _numbers(0.0)
    model = torch.nn.ParameterDict(_numbers(0.0))

    def load() -> None:
        while True:
            loaded = ptsave.load(path, process_group=group)
            assert torch.equal(loaded["a"], _numbers(7.0)["a"])
            ptsave.load_into(path, target, process_group=group)
            assert torch.equal(target["a"], loaded["a"])
            ptsave.load_model(model, path, process_group=group)
            assert torch.equal(model["a"], loaded["a"])

    (folder / f"ready-{rank}").touch()
    with pytest.raises(RuntimeError) as caught:
        load()
    assert str(path) in str(caught.value)
    assert f"rank {rank} of {size}" in str(caught.value)
    os._exit(0)  # the group cannot be ended any more


@pytest.mark.kill
@pytest.mark.timeout(0)
def test_a_rank_is_killed_while_all_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_archive, "CHUNK_NBYTES", 1 << 16)
    chance = random.Random(SEED)
    path = tmp_path / "a.pt"
    torch.save(_numbers(7.0), path)
    # Two or four ranks, on one host or on two; the first or the last of them is killed.
    cases = itertools.product((2, 4), ("aaaa", "abab"), (0, -1))
    for number, (size, hosts, victim) in zip(range(max(8, ROUNDS // 5)), itertools.cycle(cases)):
        folder = tmp_path / str(number)
        folder.mkdir()

        def act(rank: int, folder: Path = folder, size: int = size, hosts: str = hosts) -> None:
            monkeypatch.setattr(group_call, "host_identity", lambda: hosts[rank])
            _load_for_ever(path, folder, rank, size)

        ranks = ForkedRanks(folder, act, size, timeout_s=_TIMEOUT_S)
        while len(list(folder.glob("ready-*"))) < size:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        killed = ranks.children[victim]
        with suppress(ProcessLookupError):
            os.kill(killed.pid, signal.SIGKILL)
        begin = time.monotonic()
        for rank, (status, message) in enumerate(child.wait() for child in ranks.children):
            if rank == victim % size:
                assert os.WIFSIGNALED(status), f"seed {SEED}: {message}"
            else:
                assert status == 0, f"seed {SEED}: {message or status}"
        assert time.monotonic() - begin < _TIMEOUT_S + 60, f"seed {SEED}"


# -------------------------------------------------------------------------------- parts of storages


def _random_view(choice: random.Random, base: torch.Tensor) -> torch.Tensor:
    """Return a view of a storage: slices, steps, permutations, overlaps and repetitions."""
    shape = [choice.randint(1, 9) for _ in range(choice.randint(0, 4))]
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, choice.choice([step, step, step + choice.randint(0, 3), 0, 1]))
        step = max(step, strides[0]) * n
    order = choice.sample(range(len(shape)), len(shape))
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    while span > len(base):
        shape = [max(n - 1, 1) for n in shape]
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    view = base.as_strided(shape, strides, choice.randint(0, len(base) - span)).permute(order)
    if view.is_complex() and choice.random() < 0.5:
        view = view.conj()
        return view.imag if choice.random() < 0.5 else view  # which has the negative bit
    return view


def test_parts_make_the_whole() -> None:
    choice = random.Random(0)
    for _ in range(400):
        dtype = choice.choice([torch.float32, torch.int8, torch.complex64, torch.bfloat16])
        base = torch.randint(-100, 100, (choice.randint(1, 2000),)).to(dtype)
        view = _random_view(choice, base)
        target = torch.full(view.shape[::-1], 77, dtype=torch.complex128)
        target = target.permute([*reversed(range(view.dim()))])
        data = base.view(torch.uint8)
        begin, where = 0, StorageView.of(view)
        while begin < len(data):
            end = begin + PART_ALIGNMENT * choice.randint(1, 20)
            # At another address than in the storage, as in a chunk.
            chunk = torch.cat([torch.zeros(PART_ALIGNMENT, dtype=torch.uint8), data[begin:end]])
            where.copy_part(target, chunk[PART_ALIGNMENT:], begin)
            begin = end
        assert torch.equal(target, view.to(torch.complex128)), (view.shape, view.stride())


def test_quantized_tensors_are_more_than_bytes() -> None:
    assert is_viewable(torch.zeros(2, dtype=torch.float8_e4m3fn))
    assert is_viewable(torch.zeros(2, dtype=torch.bool))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is going to remove them
        assert not is_viewable(torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.qint8))
