"""`ptsave compact`: the same object in less space."""

from __future__ import annotations

import os
import random
import shutil
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip, offset_of
from command_line import fail, run
from stock_comparison import deflated
from torch import Tensor
from warm_python import run_warm

import ptsave
from ptsave.conversion.compacting import Compaction, compact
from ptsave.errors import CorruptCheckpointError

run_compact = partial(run, "compact")


def saved(path: Path, obj: Any) -> Path:
    torch.save(obj, path)
    return path


def storage_nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def compacted(tmp_path: Path, obj: Any, **options: Any) -> tuple[Any, Compaction]:
    path = saved(tmp_path / "a.pt", obj)
    done = compact(path, tmp_path / "b.pt", force=True, **options)
    assert done.is_written
    assert done.nbytes == (tmp_path / "b.pt").stat().st_size
    assert done.nbytes_before == path.stat().st_size
    return torch.load(tmp_path / "b.pt", weights_only=True), done


def test_views_get_storages_of_their_own(tmp_path: Path) -> None:
    base = torch.randn(1000, 100)
    obj = {"row": base[7], "block": base[20:30], "nothing": base[5:5], "number": base[3, 3]}
    found, done = compacted(tmp_path, obj)
    for name, tensor in obj.items():
        assert torch.equal(found[name], tensor)
        assert found[name].stride() == tensor.stride()
        assert storage_nbytes(found[name]) == tensor.nbytes
    assert (done.n_tensors, done.n_storages) == (4, 1)
    assert done.nbytes < 10_000
    assert done.nbytes_before > 400_000


def test_views_that_overlap_share(tmp_path: Path) -> None:
    base = torch.arange(10_000.0)
    obj = {"a": base[10:20], "b": base[15:30], "c": base[15:30:5], "far": base[9000:9001]}
    found, _ = compacted(tmp_path, obj)
    assert [storage_nbytes(tensor) for tensor in found.values()] == [80, 80, 80, 4]
    found["b"].zero_()
    assert found["a"].tolist() == [10, 11, 12, 13, 14, 0, 0, 0, 0, 0]
    assert found["c"].tolist() == [0, 0, 0]
    assert found["far"].tolist() == [9000]


def test_strided_views_alone_become_contiguous(tmp_path: Path) -> None:
    base = torch.randn(1000, 100)
    for view in (base[:, 3], torch.arange(10_001)[::100]):
        found, done = compacted(tmp_path, {"view": view})
        assert torch.equal(found["view"], view)
        assert storage_nbytes(found["view"]) == view.nbytes
        assert done.n_storages == 1
    found, _ = compacted(tmp_path, {"nearly": base[1:, 1:]})
    assert found["nearly"].stride() == (100, 1)


def test_views_that_are_near_stay_together(tmp_path: Path) -> None:
    base = torch.arange(5000.0)  # as the parameters in one flat buffer, with padding in between
    obj = {f"weight{i}": base[10 * i : 10 * i + 9] for i in range(400)}
    found, done = compacted(tmp_path, obj)
    assert done.nbytes < done.nbytes_before
    assert {storage_nbytes(tensor) for tensor in found.values()} == {16_000 - 4}
    assert all(torch.equal(found[name], tensor) for name, tensor in obj.items())


@pytest.mark.parametrize("kind", ["attribute", "sparse"])
def test_views_share_with_what_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    base = torch.arange(1000.0)
    if kind == "attribute":
        other = base[:500]
        other.note = "which plain tensors have not"  # type: ignore[attr-defined]
    else:
        other = torch.sparse_coo_tensor(torch.tensor([[1, 2, 3]]), base[:3], (5,))
    found, _ = compacted(tmp_path, {"other": other, "view": base[:2]})
    found["view"].fill_(7)
    base[:2] = 7
    assert torch.equal(found["other"].to_dense(), other.to_dense())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay_as_they_are(tmp_path: Path) -> None:
    parts = [torch.arange(3.0), torch.arange(5.0)]
    obj = {"nested": torch.nested.nested_tensor(parts), "view": torch.arange(1000.0)[:2]}
    found, _ = compacted(tmp_path, obj)
    assert all(map(torch.equal, found["nested"].unbind(), parts))
    assert storage_nbytes(found["view"]) == 8


MEMORY = """
import ptsave

def peak():  # not getrusage, which begins with the parent's
    words = open("/proc/self/status").read().split()
    return int(words[words.index("VmHWM:") + 1])

ptsave.compact({small!r}, {target!r})
before = peak()
ptsave.compact({large!r}, {target!r}, force=True)
ptsave.convert({large!r}, {target!r}, force=True)
print((peak() - before) >> 10)
"""


def test_compressed_files_are_inflated_in_pieces(tmp_path: Path) -> None:
    """Into a temporary file: one of 150 KB has 128 MiB in it."""
    paths = {"small": 1 << 10, "large": 128 << 20}
    for name, nbytes in paths.items():
        path = saved(tmp_path / name, {"view": torch.zeros(nbytes, dtype=torch.uint8)[7:10]})
        path.write_bytes(deflated(path.read_bytes()))
    large, target = tmp_path / "large", tmp_path / "target.pt"
    code = MEMORY.format(small=str(tmp_path / "small"), large=str(large), target=str(target))
    found = run_warm(code)
    assert int(found.stdout) <= 64, found.stdout
    assert storage_nbytes(torch.load(target)["view"]) == 128 << 20
    done = compact(large, target, force=True)
    assert (done.nbytes_before, done.nbytes) == (large.stat().st_size, target.stat().st_size)
    assert torch.load(target)["view"].tolist() == [0] * 3
    data = bytearray(large.read_bytes())
    at = data.index(b"data/0") + 300
    data[at : at + 9] = b"otherwise"
    large.write_bytes(data)
    with pytest.raises(ptsave.CorruptCheckpointError, match="data/0"):
        compact(large, target, force=True)


def test_is_never_replaced_by_something_larger(tmp_path: Path) -> None:
    # In the file it is from, its name is shorter.
    path = saved(tmp_path / "a.pt", {"a": torch.ones(3), "b": torch.ones(5)[1:]})
    longer = path.rename(tmp_path / f"{'a' * 200}.pt")
    data = longer.read_bytes()
    result = run_compact(longer, "--in-place")
    assert "nothing to gain" in result.stdout
    assert longer.read_bytes() == data


def test_many_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(6_000_000, dtype=torch.uint8)
    obj = {str(i): base[3000 * i : 3000 * i + 5] for i in range(2000)}
    found, done = compacted(tmp_path, obj)
    assert all(torch.equal(found[name], tensor) for name, tensor in obj.items())
    assert done.nbytes < 1_000_000


def test_all_else_stays(tmp_path: Path) -> None:
    base = torch.randn(100)
    shared = base[:3]
    obj: Any = OrderedDict(
        step=7,
        parameter=torch.nn.Parameter(base[10:13], requires_grad=False),
        trained=torch.nn.Parameter(base[20:23]),
        conjugate=torch.randn(9, dtype=torch.complex64)[3:5].conj(),
        negative=torch._neg_view(torch.randn(9)[3:5]),
        nested=[shared, (shared, {"text": "x", "size": torch.Size([1, 2])})],
        storage=torch.ones(4).untyped_storage(),
        whole=torch.ones(3, 4).t(),
    )
    metadata = OrderedDict({"": {"version": 2}})
    obj._metadata = metadata
    found, _ = compacted(tmp_path, obj)
    assert found._metadata == metadata
    assert type(found) is OrderedDict
    assert list(found) == list(obj)
    assert not found["parameter"].requires_grad
    assert found["trained"].requires_grad
    assert isinstance(found["trained"], torch.nn.Parameter)
    assert found["conjugate"].is_conj()
    assert found["negative"].is_neg()
    assert found["nested"][0] is found["nested"][1][0]
    assert found["nested"][1][1] == obj["nested"][1][1]
    assert found["storage"]._untyped_storage.tolist() == obj["storage"].tolist()
    assert found["whole"].stride() == (1, 4)
    for name in ("parameter", "trained", "conjugate", "negative", "whole"):
        assert torch.equal(found[name], obj[name])


def test_nothing_to_save(tmp_path: Path) -> None:
    obj = {"a": torch.ones(3), "b": torch.ones(2, 3).t(), "n": 1}
    path = saved(tmp_path / "a.pt", obj)
    before = path.stat()
    assert "nothing to gain" in run_compact(path, "--in-place").stdout
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    (tmp_path / "copy").mkdir()
    assert "nothing to gain" in run_compact(path, "-o", tmp_path / "copy" / "a.pt").stdout
    assert (tmp_path / "copy" / "a.pt").read_bytes() == path.read_bytes()


def test_in_place(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.arange(100_000)[5:8]})
    nbytes = path.stat().st_size
    result = run_compact(path, "--dry-run")
    assert "could be saved in 1 storage\n" in result.stdout
    assert path.stat().st_size == nbytes
    result = run_compact(path, "--in-place")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"wrote {path}: 783 KiB -> ")
    assert path.stat().st_size < 2000
    assert torch.load(path)["a"].tolist() == [5, 6, 7]
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("legacy", [False, True])
def test_files_that_load_whole(tmp_path: Path, legacy: bool) -> None:
    base = torch.randn(10_000)
    obj = {"a": base[5:8], "column": base.view(100, 100)[:, 1], "sparse": torch.eye(3).to_sparse()}
    if legacy:
        obj.pop("column")
    torch.save(obj, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    compact(tmp_path / "a.pt", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["a"], obj["a"])
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))


def test_random_views(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(20):
        bases = [torch.randn(40, 50), torch.randn(500, dtype=torch.float64)]
        obj = {}
        for i in range(chance.randrange(1, 8)):
            tensor = chance.choice(bases)
            for _ in range(chance.randrange(1, 4)):
                dim = chance.randrange(tensor.dim())
                begin = chance.randrange(tensor.shape[dim])
                end = chance.randrange(begin, tensor.shape[dim]) + 1
                index = [slice(None)] * tensor.dim()
                index[dim] = slice(begin, end, chance.choice([1, 1, 2]))
                tensor = tensor[tuple(index)]
            obj[str(i)] = tensor if chance.random() < 0.7 else tensor.t()
        found, done = compacted(tmp_path, obj)
        assert done.nbytes <= done.nbytes_before or done.n_storages == 0
        names = list(obj)
        for name in names:
            assert torch.equal(found[name], obj[name])
        for first in names:  # what shared elements still does
            found[first].fill_(7)
            obj[first].fill_(7)
            for name in names:
                assert torch.equal(found[name], obj[name])


def test_damage(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"whole": torch.ones(50), "part": torch.arange(1000)[:9]})
    for name in ("whole", "part"):
        shutil.copy(path, tmp_path / "damaged.pt")
        flip(tmp_path / "damaged.pt", offset_of(path, name))
        data = (tmp_path / "damaged.pt").read_bytes()
        assert f"used by {name}" in fail("compact", tmp_path / "damaged.pt", "--in-place")
        assert (tmp_path / "damaged.pt").read_bytes() == data
        with pytest.raises(CorruptCheckpointError):
            compact(tmp_path / "damaged.pt", tmp_path / "b.pt")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "damaged.pt"]


def test_what_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", torch.ones(2))
    ptsave.save_model({"a": torch.ones(2)}, tmp_path / "m")
    cases: list[tuple[list[object], str]] = [
        ([path], "pass one of"),
        ([path, "--in-place", "-o", "b.pt"], "pass one of"),
        ([path, "-o", path], "--in-place"),
        ([path, "-o", tmp_path / "m" / "model.safetensors"], "--force"),
        ([tmp_path / "m", "-o", tmp_path / "m"], "--in-place"),
        ([tmp_path / "missing.pt", "--in-place"], "No such file"),
    ]
    for arguments, words in cases:
        assert words in fail("compact", *arguments)


@pytest.mark.parametrize("target", [b"", "a\0b.pt", ".pt", "b.pt/", "no/such/b.pt"])
def test_a_target_that_names_no_file(tmp_path: Path, target: Any) -> None:
    """An empty name, of a variable that is not set, is not the source's."""
    path = saved(tmp_path / "a.pt", torch.ones(1000, 1000)[0])
    before = path.read_bytes()
    with pytest.raises((OSError, RuntimeError, ValueError), match=r"file name|null byte|directory"):
        compact(path, target, force=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("target", [None, "b.pt"])
def test_options_for_the_url_of_a_local_target(tmp_path: Path, target: str | None) -> None:
    path = saved(tmp_path / "a.pt", torch.ones(1000, 1000)[0])
    before = path.read_bytes()
    for dry_run in (False, True):
        with pytest.raises(TypeError, match="storage_options"):
            compact(path, target, dry_run=dry_run, target_storage_options={"anon": True})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.pt"]
