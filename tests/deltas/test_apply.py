"""`apply` brings modules, state dicts and files to a version, and `Publisher` checks its base."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import delta_reference as reference
import pytest
import torch
import torch.distributed as dist
from delta_reference import assert_same_bits, changed, random_bits
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ptsave
from ptsave import _C
from ptsave.contents.directories import find_files
from ptsave.deltas import Publisher, Weights, apply, applying, fold, remove, versions
from ptsave.support.locks import try_lock
from ptsave.writing.targets import resolve_folder

pytestmark = pytest.mark.usefixtures("one_torch_thread")  # a pool does not outlive a fork
_N = 4


def states(n: int = _N) -> list[dict[str, Tensor]]:
    """Return weights and later versions of them; each version changes two of the tensors."""
    found = [
        {
            "a.weight": random_bits(torch.bfloat16, (700, 900)),
            "a.bias": random_bits(torch.float32, (33,)),
            "b.weight": random_bits(torch.int8, (5, 5)),
            "b.scale": torch.tensor(1.5),
        }
    ]
    for number in range(1, n):
        new = dict(found[-1])
        for name in ("a.weight", ("a.bias", "b.weight", "b.scale")[number % 3]):
            new[name] = changed(new[name], 0.05)
        found.append(new)
    return found


def publish_all(root: Path, weights: list[dict[str, Tensor]], **options: Any) -> Publisher:
    publisher = Publisher(root, weights[0], **{"max_depth": None, **options})
    for each in weights[1:]:
        publisher.publish(each)
    return publisher


def copy_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------- in memory


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_a_module(encoding: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    replica = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40)).eval()
    replica.load_state_dict(model.state_dict())
    publisher = Publisher(tmp_path, model, encoding=encoding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    version = 0
    for _ in range(3):
        model(torch.randn(8, 30)).square().sum().backward()
        optimizer.step()
        publisher.publish(model)
        loss = replica(torch.randn(8, 30)).sum()
        version = apply(tmp_path, replica, base_version=version)
        assert version == publisher.version
        assert_same_bits(replica.state_dict(), model.state_dict())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # autograd knows of the change


def test_tensors_that_are_not_contiguous_or_share_memory(tmp_path: Path) -> None:
    old, new = torch.randn(6, 5), torch.randn(6, 5)
    Publisher(tmp_path, {"a": old, "b": old, "c": old.to(torch.cfloat).conj()}).publish(
        {"a": new, "b": new, "c": new.to(torch.cfloat).conj()}
    )
    memory = torch.empty(5, 12)
    view = memory.t()[::2]
    tied = view.copy_(old)
    conj = old.to(torch.cfloat).conj()
    apply(tmp_path, {"a": tied, "b": tied, "c": conj})
    assert torch.equal(view, new)
    assert torch.equal(conj, new.to(torch.cfloat))


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
@pytest.mark.parametrize("known", [True, False])
def test_a_target_of_any_version(encoding: Any, known: bool, tmp_path: Path) -> None:
    weights = states()
    publish_all(tmp_path, weights, encoding=encoding)
    for begin in range(_N):
        for end in range(max(begin, 1), _N):
            held = copy_of(weights[begin])
            base = begin if known else None
            assert apply(tmp_path, held, end, base_version=base) == end
            assert_same_bits(held, weights[end])


@pytest.mark.usefixtures("one_rank")
def test_tensors_without_memory_of_their_own(tmp_path: Path) -> None:
    """Each rank has a part of a DTensor, so patches of the whole tensor do not fit."""
    old, new = {"a": torch.zeros(8, 4)}, {"a": torch.ones(8, 4)}
    placed = {"a": distribute_tensor(old["a"].clone(), init_device_mesh("cpu", (1,)), [Shard(0)])}
    publisher = Publisher(tmp_path / "versions", old)
    with pytest.raises(TypeError, match="a DTensor has no memory of its own"):
        publisher.publish(placed)
    publisher.publish(new)
    for refused in (
        lambda: apply(tmp_path / "versions", placed),
        lambda: Publisher(tmp_path / "other", placed),
    ):
        with pytest.raises(TypeError, match=r"pass a plain tensor, for example full_tensor\(\)"):
            refused()
    assert_same_bits({"a": placed["a"].full_tensor()}, old)


OVERLAPPING = {
    "expanded": lambda: torch.zeros(1, 40).expand(30, 40),
    "a window": lambda: torch.zeros(100).as_strided((30, 40), (1, 1)),
}


@pytest.mark.parametrize("make", OVERLAPPING.values(), ids=OVERLAPPING)
def test_a_target_that_overlaps_itself(make: Callable[[], Tensor], tmp_path: Path) -> None:
    old = {"a": torch.zeros(30, 40), "b": torch.zeros(9)}
    Publisher(tmp_path, old).publish({"a": torch.randn(30, 40), "b": torch.ones(9)})
    held = {"a": make(), "b": torch.zeros(9)}
    with pytest.raises(TypeError, match=r"tensor a is expanded, or its elements overlap"):
        apply(tmp_path, held)
    assert not any(tensor.any() for tensor in held.values())


def test_a_target_with_other_tensors(tmp_path: Path) -> None:
    weights = states()
    publish_all(tmp_path, weights)
    held = {**copy_of(weights[0]), "other": torch.ones(2)}
    apply(tmp_path, held)
    assert_same_bits(held, {**weights[-1], "other": torch.ones(2)})


def test_one_memory_for_tensors_that_differ(tmp_path: Path) -> None:
    """A version changes other elements of each tensor, but the target has one memory for both."""
    old = {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}
    new = copy_of(old)
    new["a"][90_000] = new["b"][10] = 1
    Publisher(tmp_path, old).publish(new)
    held = dict.fromkeys("ab", torch.zeros(100_000))
    with pytest.raises(ptsave.WrongBaseError):
        apply(tmp_path, held)
    assert not held["a"].any()


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_a_wrong_base(encoding: Any, tmp_path: Path) -> None:
    weights = states()
    publish_all(tmp_path, weights, encoding=encoding)
    for name in ("a.weight", "a.bias"):
        held = copy_of(weights[1])
        held[name] = changed(held[name], 1)
        before = copy_of(held)
        for base in (None, 1):
            with pytest.raises(ptsave.WrongBaseError, match=f"tensor {name}"):
                apply(tmp_path, held, base_version=base)
            assert_same_bits(held, before)


def test_requests_that_do_not_fit(tmp_path: Path) -> None:
    weights = states()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no version"):
        apply(tmp_path / "empty", weights[0])
    root = tmp_path / "root"
    publish_all(root, weights)
    held = copy_of(weights[0])
    with pytest.raises(FileNotFoundError, match="version 9 is missing"):
        apply(root, held, 9)
    with pytest.raises(ValueError, match="the target has version 3, which is later"):
        apply(root, held, 2, base_version=3)
    with pytest.raises(ValueError, match=r"has no tensor a\.weight"):
        apply(root, {"a.bias": held["a.bias"]})
    with pytest.raises(TypeError, match="not a tensor"):
        apply(root, {**held, "a.bias": 3})  # type: ignore[dict-item]
    shutil.rmtree(root / "weight_v000002")
    for call in (lambda: apply(root, held), lambda: fold(root)):
        with pytest.raises(FileNotFoundError, match=r"^\[Errno 2\] version 2 is missing"):
            call()
    shutil.rmtree(root / "weight_v000001")
    with pytest.raises(ptsave.WrongBaseError):
        apply(root, held)
    assert_same_bits(held, weights[0])
    held = copy_of(weights[2])
    assert apply(root, held) == 3  # older versions may be gone
    assert_same_bits(held, weights[3])


@pytest.mark.parametrize("value", [-3, True, 1.0, "1"])
def test_numbers_that_are_none(value: Any, tmp_path: Path) -> None:
    weights, root = states(), tmp_path / "versions"
    publisher = publish_all(root, weights)
    ptsave.save_model(weights[0], tmp_path / "served")
    loaded = Weights(root, tmp_path / "served")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("version", lambda: apply(root, tmp_path / "served", value)),
        ("base_version", lambda: apply(root, weights[0], base_version=value)),
        ("version", lambda: Publisher(tmp_path / "new", weights[0], version=value)),
        ("max_depth", lambda: Publisher(tmp_path / "new", weights[0], max_depth=value)),
        ("version", lambda: publisher.publish(weights[0], value)),
        ("version", lambda: Weights(root, version=value)),
        ("version", lambda: loaded.changed_since(value)),
        ("version", lambda: remove(root, value)),
    ]
    for name, call in calls:
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be a"):
            call()


def test_libraries_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = states()
    publish_all(tmp_path, weights, checksum="blake3")
    for name in ("zstandard", "blake3"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(
                ImportError, match=rf"{name} library: pip install \"ptsave\[deltas\]\""
            ):
                apply(tmp_path, copy_of(weights[0]))
            with pytest.raises(ImportError, match=r"ptsave\[deltas\]"):
                Publisher(tmp_path / "new", weights[0], checksum="blake3")


# -------------------------------------------------------------------------------------- in files


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
@pytest.mark.parametrize("shard_size", ["1GB", "1KB"])
def test_files(checksums: bool, encoding: Any, shard_size: str, tmp_path: Path) -> None:
    weights, served = states(), tmp_path / "served"
    ptsave.save_model(weights[0], served, max_shard_size=shard_size, checksums=checksums)
    publisher = Publisher(tmp_path / "versions", served, encoding=encoding)
    for number in range(1, _N):
        publisher.publish(weights[number])
        assert apply(tmp_path / "versions", served, fsync=number == 2) == number
        assert_same_bits(read(served), weights[number])
        assert_same_bits(ptsave.load(served), weights[number])  # compares CRCs, if there are any
    assert apply(tmp_path / "versions", served) == _N - 1
    assert {*os.listdir(served / ".weight_sync")} == {"state.json", "lock"}


def test_files_whose_version_is_unknown(tmp_path: Path) -> None:
    weights, served = states(), tmp_path / "served"
    publish_all(tmp_path / "versions", weights, encoding="xor")
    for number in range(_N):
        shutil.rmtree(served, ignore_errors=True)
        ptsave.save_model(weights[number], served, max_shard_size="1KB")
        assert apply(tmp_path / "versions", served) == _N - 1
        assert_same_bits(read(served), weights[-1])


@pytest.mark.parametrize("checksum", versions.CHECKSUMS)
@pytest.mark.parametrize("name", ["a.bias", "a.weight"])
def test_files_with_a_wrong_base_stay_as_they_are(name: str, checksum: str, tmp_path: Path) -> None:
    weights, served = states(), tmp_path / "served"
    publish_all(tmp_path / "versions", weights, checksum=checksum)
    held = {**copy_of(weights[0]), name: torch.zeros_like(weights[0][name])}
    ptsave.save_model(held, served)
    before = (served / "model.safetensors").read_bytes()
    with pytest.raises(ptsave.WrongBaseError):
        apply(tmp_path / "versions", served)
    assert (served / "model.safetensors").read_bytes() == before
    for root, base in (("none", None), ("versions", 2)):
        with pytest.raises((FileNotFoundError, ValueError)):
            apply(tmp_path / root, served, 1, base_version=base)
    assert os.listdir(served) == ["model.safetensors"]


def test_paths_as_bytes(tmp_path: Path) -> None:
    weights, served = states(2), tmp_path / "served.safetensors"
    ptsave.save_model(weights[0], served)
    root, file = os.fsencode(tmp_path / "versions"), os.fsencode(served)
    Publisher(root, file).publish(weights[1])  # type: ignore[arg-type]
    found = dict(ptsave.iter_weights(Weights(root, file)))  # type: ignore[arg-type]
    assert_same_bits(found, weights[1])
    assert apply(root, file) == 1  # type: ignore[arg-type]
    assert_same_bits(ptsave.load(served), weights[1])


def test_files_that_cannot_be_changed(tmp_path: Path) -> None:
    weights, served = states(), tmp_path / "served"
    publish_all(tmp_path / "versions", weights)
    served.mkdir()
    torch.save(weights[0], served / "model.pt")
    with pytest.raises(ptsave.UnsupportedSourceError, match="only safetensors files"):
        apply(tmp_path / "versions", served)
    (served / "model.pt").unlink()
    save_file(weights[0], tmp_path / "blob")
    (served / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(ValueError, match="is a link"):
        apply(tmp_path / "versions", served)


def test_a_version_is_no_target(tmp_path: Path) -> None:
    weights = states()
    publish_all(tmp_path, weights)
    for target in (tmp_path / "weight_v000002", tmp_path / "weight_v000002" / reference.SHARD):
        with pytest.raises(ValueError, match="is itself a version"):
            apply(tmp_path, target)


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_versions_with_the_same_adler32(encoding: Any, tmp_path: Path) -> None:
    """The target has the checksum of two versions, and is the older one."""
    flags = [[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0]]
    states = [{"a": torch.tensor(each, dtype=torch.uint8)} for each in flags]
    assert zlib.adler32(bytes(flags[1])) == zlib.adler32(bytes(flags[3]))
    publish_all(tmp_path, states, encoding=encoding, checksum="adler32", max_depth=None)
    held = copy_of(states[1])
    assert apply(tmp_path, held) == 3
    assert_same_bits(held, states[3])


def test_a_single_file(tmp_path: Path) -> None:
    weights = states()
    publish_all(tmp_path / "versions", weights)
    save_file(weights[0], tmp_path / "model.safetensors")
    assert apply(tmp_path / "versions", tmp_path / "model.safetensors") == _N - 1
    assert_same_bits(load_file(tmp_path / "model.safetensors"), weights[-1])


def killed(*_: object, **__: object) -> None:
    os._exit(9)


def half_changed(changes: list[Any], n_threads: int, end: Callable[[], object] = killed) -> None:
    """Change only some of the bytes, the last tensor's in part, and end the process."""
    half = changes[: len(changes) // 2 + 1]
    data, target, _ = half[-1]
    new = target.clone()
    apply_changes([*half[:-1], (data, new, None)], n_threads=n_threads)
    target[: len(target) // 2] = new[: len(target) // 2]
    end()


apply_changes = _C.apply_changes
PLACES: dict[str, tuple[Any, str, Any]] = {
    "before the journal": (applying, "save", killed),
    "after it": (os, "unlink", killed),
    "before changes": (_C, "apply_changes", killed),
    "in the middle": (_C, "apply_changes", half_changed),
    "after changes": (applying._Tensor, "check", killed),
    "after checks": (applying, "write_bytes", killed),
    "at the end": (_C, "remove_file", killed),
}


def in_killed_process(action: Callable[[], object]) -> None:
    """Run an action in a child that is killed in the middle."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_kill_while_files_change(
    place: Any, encoding: Any, checksums: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call finds the old version or the new one."""
    weights, served, root = states(), tmp_path / "served", tmp_path / "versions"
    publish_all(root, weights, encoding=encoding)
    ptsave.save_model(weights[0], served, max_shard_size="1KB", checksums=checksums)
    apply(root, served, 1)
    with monkeypatch.context() as patch:
        patch.setattr(*place)
        in_killed_process(lambda: apply(root, served, 2))
    if not (served / ".weight_sync" / "state.json").exists():
        for undo_place in ("in the middle", "after checks", "at the end"):  # killed as well
            with monkeypatch.context() as patch:
                patch.setattr(*PLACES[undo_place])
                in_killed_process(lambda: apply(root, served, 2))
    sync = applying._Sync(str(served), resolve_folder(root), fsync=False)
    with sync.locked():
        sync.undo()
    sync.paths = find_files(str(served)).paths
    assert sync.version == (2 if place[1] == "remove_file" else 1)
    assert_same_bits(ptsave.load(served), weights[sync.version])
    assert not (served / ".weight_sync" / "ptsave-journal.pt").exists()
    assert apply(root, served) == _N - 1
    assert_same_bits(ptsave.load(served), weights[-1])


def test_a_kill_of_a_first_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of the files was never known."""
    weights, served, root = states(), tmp_path / "served", tmp_path / "versions"
    publish_all(root, weights)
    ptsave.save_model(weights[1], served)
    with monkeypatch.context() as patch:
        patch.setattr(_C, "apply_changes", half_changed)
        in_killed_process(lambda: apply(root, served))
    assert apply(root, served, 2) == 2
    assert_same_bits(ptsave.load(served), weights[2])


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_error_in_the_middle(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, served, root = states(), tmp_path / "served", tmp_path / "versions"
    publish_all(root, weights)
    ptsave.save_model(weights[0], served)
    held = copy_of(weights[0])
    target: Any = held if in_memory else served
    calls = 0

    def fail_once(changes: list[Any], n_threads: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            half_changed(changes, n_threads, interrupt)
        apply_changes(changes, n_threads=n_threads)

    with monkeypatch.context() as patch:
        patch.setattr(_C, "apply_changes", fail_once)
        with pytest.raises(KeyboardInterrupt):
            apply(root, target, 1)
    assert calls == 2
    assert_same_bits(held, weights[0])
    assert_same_bits(ptsave.load(served), weights[0])
    assert apply(root, target) == _N - 1
    assert_same_bits(held if in_memory else ptsave.load(served), weights[-1])


def test_a_journal_beside_files_of_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang copies the base again if no version is known; the journal must not change that."""
    weights, served, root = states(), tmp_path / "served", tmp_path / "versions"
    publish_all(root, weights)
    ptsave.save_model(weights[0], served)
    with monkeypatch.context() as patch:
        patch.setattr(_C, "apply_changes", half_changed)
        in_killed_process(lambda: apply(root, served, 2))
    save_file(weights[3], served / "model.safetensors")
    (served / ".weight_sync" / "state.json").write_text('{"version": "000003"}')
    assert apply(root, served) == 3
    assert_same_bits(read(served), weights[3])


def test_files_that_have_been_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the version nor the journal of a file says anything of another one."""
    weights, served, root = states(), tmp_path / "served", tmp_path / "versions"
    publish_all(root, weights)

    def replace(version: int) -> None:
        ptsave.save_model(weights[version], served)

    replace(0)
    old = (served / "model.safetensors").read_bytes()
    for in_place in (True, False):
        apply(root, served, 2)
        if in_place:
            (served / "model.safetensors").write_bytes(old)
        else:
            replace(0)
        assert apply(root, served, 2) == 2
        assert_same_bits(ptsave.load(served), weights[2])
    with monkeypatch.context() as patch:
        patch.setattr(_C, "apply_changes", half_changed)
        in_killed_process(lambda: apply(root, served))
    for has_file in (True, False):
        (served / "model.safetensors").rename(tmp_path / f"kept{has_file}")  # with its inode
        if has_file:
            replace(1)
        with pytest.raises(ptsave.CorruptCheckpointError, match=r"has been replaced: remove it"):
            apply(root, served)
    replace(1)
    (served / ".weight_sync" / "ptsave-journal.pt").unlink()
    apply(root, served)
    assert_same_bits(ptsave.load(served), weights[-1])


def test_several_files_in_one_directory(tmp_path: Path) -> None:
    weights, files = states(), [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    publish_all(tmp_path / "versions", weights)
    for file in files:
        save_file(weights[0], file)
    for version in range(1, _N):
        for file in files:
            apply(tmp_path / "versions", file, version)
            assert_same_bits(load_file(file), weights[version])


@pytest.mark.parametrize("is_killed", [False, True])
def test_versions_of_another_run(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its versions have the same numbers, so the files' version is unknown."""
    flags = {name: torch.zeros(1000) for name in "ab"}
    served, runs = tmp_path / "served", [tmp_path / "one", tmp_path / "two"]
    ptsave.save_model(flags, served)
    first = [flags, *({**flags, "b": torch.full((1000,), number)} for number in (1.0, 2.0, 3.0))]
    publish_all(runs[0], first)
    apply(runs[0], served, 2)
    second = [first[2]]
    for name, value in (("a", 5.0), ("a", 6.0), ("b", 7.0)):
        second.append({**second[-1], name: torch.full((1000,), value)})
    publish_all(runs[1], second)
    if is_killed:
        with monkeypatch.context() as patch:
            patch.setattr(_C, "apply_changes", half_changed)
            in_killed_process(lambda: apply(runs[0], served))
    assert apply(runs[1], served) == 3
    assert_same_bits(ptsave.load(served), second[3])


def test_a_chain_is_folded_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions may vanish after the plan; the target then stays as it is, until the next call."""
    weights = states()
    publish_all(tmp_path / "versions", weights)
    ptsave.save_model(weights[0], tmp_path / "served")
    held = copy_of(weights[0])
    stock = applying.plan_for

    def folding(*arguments: Any) -> Any:
        plan = stock(*arguments)
        fold(tmp_path / "versions")
        return plan

    target: Any
    for target in (held, tmp_path / "served"):
        with monkeypatch.context() as patch:
            patch.setattr(applying, "plan_for", folding)
            with pytest.raises(FileNotFoundError, match="weight_v"):
                apply(tmp_path / "versions", target)
        assert_same_bits(held if target is held else ptsave.load(target), weights[0])
        assert apply(tmp_path / "versions", target) == _N - 1
        assert_same_bits(held if target is held else ptsave.load(target), weights[-1])
        shutil.rmtree(tmp_path / "versions")
        publish_all(tmp_path / "versions", weights)


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_several_appliers(encoding: Any, tmp_path: Path) -> None:
    weights, served, root = states(), tmp_path / "served", tmp_path / "versions"
    publish_all(root, weights, encoding=encoding)
    ptsave.save_model(weights[0], served, max_shard_size="1KB")
    threads = [threading.Thread(target=apply, args=(root, served)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same_bits(read(served), weights[-1])


# ------------------------------------------------------------------------------------ publishers


def test_a_publisher_goes_on(tmp_path: Path) -> None:
    weights = states()
    publish_all(tmp_path, weights[:3])
    with pytest.raises(ValueError, match="already has version 2: pass version=2"):
        Publisher(tmp_path, weights[2])
    with pytest.raises(ValueError, match=r"the base is not version 2 .* tensor a\.weight differs"):
        Publisher(tmp_path, weights[1], version=2)
    publisher = Publisher(tmp_path, weights[2], version=2)
    assert publisher.publish(weights[3]).endswith("weight_v000003")
    held = copy_of(weights[0])
    apply(tmp_path, held)
    assert_same_bits(held, weights[3])


def test_weights_that_do_not_fit_the_base(tmp_path: Path) -> None:
    weights = states()
    publisher = Publisher(tmp_path, weights[0])
    scale = weights[0]["b.scale"]
    there, here = "torch.float32 [] in the base", "in the new weights"
    for wrong, match in (
        ({"b.scale": scale[None]}, f"tensor b.scale is torch.float32 [1] {here}, but {there}"),
        ({"b.scale": scale.double()}, f"tensor b.scale is torch.float64 [] {here}, but {there}"),
        ({"more": scale + 1}, f"tensor more is torch.float32 [] {here}, but missing in the base"),
    ):
        with pytest.raises(ValueError, match=re.escape(match)):
            publisher.publish({**weights[1], **wrong})
    del weights[1]["b.scale"]
    with pytest.raises(ValueError, match=re.escape(f"b.scale is missing {here}, but {there}")):
        publisher.publish(weights[1])
    weights = states()
    with pytest.raises(ValueError, match="the next version is 1, and not 2"):
        publisher.publish(weights[1], 2)
    with pytest.raises(ValueError, match="encoding must be one of overwrite, xor"):
        Publisher(tmp_path, weights[0], encoding="delta")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="version must be"):
        Publisher(tmp_path, weights[0], version=-1)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_publication_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weights = states()
    publisher = Publisher(tmp_path, weights[0])
    with monkeypatch.context() as patch:
        patch.setattr(versions, "write_bytes", fail)
        with pytest.raises(ptsave.SaveError, match="No space left"):
            publisher.publish(weights[1])
    assert list(tmp_path.iterdir()) == []
    publisher.publish(weights[1])
    held = copy_of(weights[0])
    apply(tmp_path, held)
    assert_same_bits(held, weights[1])


def test_a_killed_publication_leaves_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = states()
    leftover = tmp_path / ".weight_v000001.ptsave" / "weight_v000001"
    leftover.mkdir(parents=True)
    (leftover / "model-00000-of-00001.safetensors").write_bytes(b"incomplete")
    with pytest.raises(FileNotFoundError, match="there is no version"):
        apply(tmp_path, copy_of(weights[0]))
    publisher = Publisher(tmp_path, weights[0])
    publisher.publish(weights[1])
    assert os.listdir(tmp_path) == ["weight_v000001"]


def test_two_publishers(tmp_path: Path) -> None:
    weights = states()
    first, second = (Publisher(tmp_path, weights[0]) for _ in range(2))
    first.publish(weights[1])
    with pytest.raises(FileExistsError, match="another publisher has written this version"):
        second.publish(weights[2])
    assert second.version == 0
    (tmp_path / ".weight_v000002.ptsave").mkdir()
    lock = os.open(tmp_path / ".weight_v000002.ptsave" / "lock", os.O_RDWR | os.O_CREAT)
    assert try_lock(lock)
    with pytest.raises(ptsave.SaveError, match="another process is saving there"):
        first.publish(weights[2])
    os.close(lock)
    first.publish(weights[2])
    held = copy_of(weights[0])
    assert apply(tmp_path, held) == 2
    assert_same_bits(held, weights[2])


@pytest.mark.usefixtures("_clean_file_systems")
def test_a_url() -> None:
    weights = states()
    publisher = Publisher("memory://versions", weights[0])
    for number, each in enumerate(weights[1:], 1):
        file = f"memory://versions/weight_v{number:06d}/{reference.SHARD}"
        ptsave.save_model({"a": torch.ones(1)}, file)  # of a publisher that was killed
        if number > 1:
            assert apply("memory://versions", copy_of(weights[number - 1])) == number - 1
        publisher.publish(each)
    with pytest.raises(ValueError, match="already has version 3"):
        Publisher("memory://versions", weights[0])
    held = copy_of(weights[0])
    assert apply("memory://versions", held) == _N - 1
    assert_same_bits(held, weights[-1])


def test_the_reference_pulls_versions_of_a_publisher_from_files(tmp_path: Path) -> None:
    weights = states()
    ptsave.save_model(weights[0], tmp_path / "base", max_shard_size="1KB")
    publisher = Publisher(tmp_path / "versions", tmp_path / "base")
    held = {name: reference.bytes_of(tensor).copy() for name, tensor in weights[0].items()}
    for number in range(1, _N):
        publisher.publish(weights[number], number)
        reference.pull(tmp_path / "versions", number, held)
    for name, tensor in weights[-1].items():
        assert held[name].tobytes() == reference.bytes_of(tensor).tobytes()
