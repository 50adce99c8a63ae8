"""ptsave.open on local files: names, what is said about tensors, and reading parts."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import random
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _corruption import flip
from _system import nbytes_read, run_python
from safetensors.torch import save as safetensors_save
from stock_comparison import (
    assert_same_object,
    deflated,
    save_without_checksums,
    stock_load,
    stock_save,
    zip_records,
    zipped,
)
from torch import Tensor, nn

import ptsave
from ptsave.comparison.compare import compare
from ptsave.conversion.converting import convert
from ptsave.inspection.verification import verify_file
from ptsave.tree.extents import blocks_of

BIG = torch.arange(300 * 700, dtype=torch.float32).reshape(300, 700)


def training_checkpoint() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "history": [torch.ones(2), (torch.zeros(1, dtype=torch.int64), "text")],
    }


def views() -> dict[str, torch.Tensor]:
    return {
        "whole": BIG,
        "transposed": BIG.t(),
        "rows": BIG[10:20],
        "columns": BIG[:, 5:9],
        "column": BIG[:, 600],
        "steps": BIG[::7, ::11],
        "expanded": BIG[3].expand(5, 700),
        "scalar": BIG[2, 3],
        "empty": BIG[0:0],
        "windows": BIG.flatten()[:1000].unfold(0, 8, 2),
        "conjugate": torch.randn(4, 5, dtype=torch.complex64).conj(),
        "imaginary": torch.randn(4, dtype=torch.complex64).conj().imag,
        "bool": torch.tensor([True, False]),
        "half": torch.randn(9).half(),
        "uint16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "no elements": torch.empty(0, 3),
    }


def write(folder: Path, obj: object, name: str = "checkpoint.pt") -> Path:
    path = folder / name
    stock_save(obj, path)
    return path


# ------------------------------------------------------------------------------- names and values


def test_names_of_a_training_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, training_checkpoint())
    with ptsave.open(path) as archive:
        keys = archive.keys()
        assert keys[:2] == ["model.0.weight", "model.0.bias"]
        assert "optimizer.state.0.exp_avg" in keys
        assert keys[-2:] == ["history.0", "history.1.0"]
        assert len(archive) == len(keys) == len(set(keys))
        assert list(archive) == keys
        assert all(key in archive for key in keys)


def test_every_entry_is_what_torch_loads(tmp_path: Path) -> None:
    path = write(tmp_path, training_checkpoint())
    expected = stock_load(path)
    with ptsave.open(path) as archive:
        for name, value in expected.items():
            assert_same_object(archive[name], value)
        assert_same_object(archive["model.0.weight"], expected["model"]["0.weight"])
        assert_same_object(archive["model", "0.weight"], expected["model"]["0.weight"])
        assert_same_object(archive["optimizer.state.0"], expected["optimizer"]["state"][0])
        assert_same_object(archive["optimizer", "state", 0], expected["optimizer"]["state"][0])
        assert archive["optimizer.param_groups.0.lr"] == 1e-3
        assert archive["history.1.1"] == "text"
        assert_same_object(archive[""], expected)
        assert type(archive["model"]) is OrderedDict
        assert vars(archive["model"]) == vars(expected["model"])  # _metadata


def test_views(tmp_path: Path) -> None:
    path = write(tmp_path, views())
    expected = stock_load(path)
    with ptsave.open(path) as archive:
        for name, tensor in expected.items():
            found = archive.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor), name
            assert found.is_conj() == tensor.is_conj()
            assert found.untyped_storage().nbytes() <= max(found.nbytes, 700 * 4), name
        assert_same_object(archive[""], expected)


def test_parameters_gradients_and_storages(tmp_path: Path) -> None:
    obj = {
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(3, requires_grad=True),
        "storage": [torch.arange(10.0).untyped_storage(), torch.ones(3)],
    }
    path = write(tmp_path, obj)
    with ptsave.open(path) as archive:
        for name, tensor in stock_load(path).items():
            assert_same_object(archive[name], tensor)


def test_what_is_shared_stays_shared(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    inner = {"a": base[10:20], "b": base[15:50], "again": None}
    inner["again"] = [inner["a"]]  # type: ignore[assignment]
    cycle: list[Any] = [base[3:5]]
    cycle.append(cycle)
    path = write(tmp_path, {"inner": inner, "cycle": cycle})
    with ptsave.open(path) as archive:
        read = archive["inner"]
        assert read["again"][0] is read["a"]
        read["a"][5] = -1.0
        assert torch.equal(read["b"][0], torch.tensor(-1.0))
        assert read["a"].untyped_storage().nbytes() < 50 * 4
        found = archive["cycle"]
        assert found[1] is found
        assert torch.equal(found[0], base[3:5])


@pytest.mark.parametrize(("obj", "name"), [(BIG, ""), ({"": BIG}, ""), ([BIG], "0")])
def test_top_level(obj: Any, name: str, tmp_path: Path) -> None:
    with ptsave.open(write(tmp_path, obj)) as archive:
        assert archive.keys() == [name]
        assert torch.equal(archive.get_tensor(name), BIG)


def test_ambiguous_names(tmp_path: Path) -> None:
    obj = {"a.b": {"c": torch.ones(1)}, "a": {"b.c": torch.zeros(2)}, 0: torch.ones(3), "d": 1}
    obj["0"] = torch.ones(4)
    path = write(tmp_path, obj)
    with ptsave.open(path) as archive:
        assert archive.keys() == [("a.b", "c"), ("a", "b.c"), (0,), ("0",)]
        for name in archive:
            assert archive.info(name).name == name
            archive.get_tensor(name)
        assert archive["a.b", "c"].shape == (1,)
        assert archive[("0",)].shape == (4,)
        with pytest.raises(KeyError, match=r"\('a\.b', 'c'\) or \('a', 'b\.c'\)"):
            archive["a.b.c"]
        assert archive["a.b"].keys() == {"c"}
        assert archive["d"] == 1


def test_missing_names(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {"layer.0.weight": torch.ones(1)}, "step": 3, "none": None})
    with ptsave.open(path) as archive:
        with pytest.raises(KeyError, match=r"did you mean 'model\.layer\.0\.weight'\?"):
            archive["model.layer.0.weigth"]
        for name in ("zzz", "step.0", ("model", "layer"), ("step", 3), "model.layer"):
            with pytest.raises(KeyError, match="no entry"):
                archive[name]
            assert name not in archive
        with pytest.raises(TypeError, match="'step' is not a tensor, but of type int"):
            archive.get_tensor("step")
        with pytest.raises(TypeError, match="a name is a str or a tuple"):
            archive[3]  # type: ignore[index]
        assert archive["none"] is None


def test_many_tensors_that_share_a_storage(tmp_path: Path) -> None:
    """What is said of each takes no longer, and no more memory, the more they are."""
    base = torch.arange(4.0 * 20_000)
    path = write(tmp_path, {f"t{i}": base[4 * i : 4 * i + 4] for i in range(20_000)})
    with ptsave.open(path) as archive:
        assert len(archive.keys()) == 20_000
        begin = time.process_time()
        infos = archive.infos()
        assert all(len(info.shared_with) == 19_999 for info in infos)
        assert time.process_time() - begin < 2  # a tuple for each: 40 s
    names = [f"t{i}" for i in range(20_000)]
    for number in (0, 1, 9_999, 19_999):
        shared, others = infos[number].shared_with, (*names[:number], *names[number + 1 :])
        assert shared == others
        assert (tuple(shared), hash(shared), repr(shared)) == (others, hash(others), repr(others))
        assert [shared[i] for i in (0, -1, 9_998)] == [others[i] for i in (0, -1, 9_998)]
        assert shared[5:2000:7] == others[5:2000:7]
        assert names[number] not in shared
        with pytest.raises(IndexError):
            shared[19_999]


def nested(depth: int, tensor: Tensor) -> Any:
    obj: Any = tensor
    for _ in range(depth):
        obj = (obj,)
    return obj


@pytest.mark.parametrize("depth", [63, 65, 199, 201, 490, 900])
def test_deep_nesting(tmp_path: Path, depth: int) -> None:
    """Errors, `verify` and `open` name the same tensors, as deep as torch.save can go."""
    tensor = torch.full((100,), 7.0)
    path = write(tmp_path, nested(depth, tensor))
    names = [".".join(["0"] * depth)]
    with ptsave.open(path) as archive:
        assert archive.keys() == names
        assert torch.equal(archive.get_tensor(names[0]), tensor)
        entry = archive[(0,) * (depth // 2)]
    for _ in range(depth - depth // 2):
        (entry,) = entry
    assert torch.equal(entry, tensor)
    assert compare(str(path), str(path)).n_tensors == 1
    assert convert(path, tmp_path / "flat.safetensors").n_tensors == 1
    data = path.read_bytes()
    path.write_bytes(data.replace(tensor.numpy().tobytes(), b"x" * tensor.nbytes))
    with pytest.raises(ptsave.CorruptCheckpointError) as info:
        ptsave.load(path)
    found = verify_file(path)
    assert info.value.entries == found.tensors == found.problems[0].entries == names


def test_nesting_that_is_too_deep(tmp_path: Path) -> None:
    """Every tensor is verified; below the limit none is named by anybody."""
    path = tmp_path / "checkpoint.pt"
    obj = {"top": torch.ones(100), "deep": nested(3000, torch.ones(99) * 7)}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        # Python's pickler that is written in Python, as Python 3.12 has a limit for what is in C.
        python = SimpleNamespace(__name__="pickle", Pickler=pickle._Pickler)
        stock_save(obj, path, pickle_module=python)
    finally:
        sys.setrecursionlimit(limit)
    with ptsave.open(path) as archive, pytest.raises(ValueError, match="nested deeper than"):
        archive.keys()
    with pytest.raises(ValueError, match="nested deeper than"):
        compare(str(path), str(path))
    with pytest.raises(ValueError, match="nested deeper than"):
        convert(path, tmp_path / "flat.safetensors")
    found = verify_file(path)
    assert (found.problems, found.tensors) == ([], ["top"])
    assert "nested deeper than" in found.remarks[0]
    data = path.read_bytes()
    path.write_bytes(data.replace((torch.ones(99) * 7).numpy().tobytes(), b"x" * 4 * 99))
    with pytest.raises(ptsave.CorruptCheckpointError) as info:
        ptsave.load(path)
    (problem,) = verify_file(path).problems
    assert (info.value.entries, problem.entries) == ([], [])
    assert info.value.record == problem.record == "data/1"


def test_tensors_in_sets_are_named_by_everybody(tmp_path: Path) -> None:
    tensor = torch.full((100,), 7.0)
    path = write(tmp_path, {"a": {tensor}, "b": torch.ones(3)})
    path.write_bytes(path.read_bytes().replace(tensor.numpy().tobytes(), b"x" * tensor.nbytes))
    with pytest.raises(ptsave.CorruptCheckpointError) as info:
        ptsave.load(path)
    found = verify_file(path)
    assert info.value.entries == found.problems[0].entries == ["a"]
    assert (found.tensors, found.whole) == (["a", "b"], ["b"])


def test_containers_that_multiply(tmp_path: Path) -> None:
    obj: Any = [torch.ones(1)]
    for _ in range(100):
        obj = [obj, obj]
    path = write(tmp_path, obj)
    with ptsave.open(path) as archive:
        assert archive.keys() == [".".join(["0"] * 101)]
        assert torch.equal(archive[(1,) * 100 + (0,)], torch.ones(1))
        assert archive.info((1,) * 100 + (0,)).nbytes == 4
        archive[""]


# ----------------------------------------------------------------------------------------- listing


def test_info(tmp_path: Path) -> None:
    path = write(tmp_path, views())
    data = path.read_bytes()
    expected = stock_load(path)
    with ptsave.open(path) as archive:
        infos = archive.infos()
        assert [info.name for info in infos] == archive.keys()
        for info in infos:
            tensor = expected[info.name]
            assert archive.info(info.name) == info
            assert (info.dtype, info.shape) == (tensor.dtype, tensor.shape)
            assert info.stride == tensor.stride()
            assert info.nbytes == tensor.nbytes
            if tensor.numel() and info.offset is not None:
                first = torch.as_strided(tensor, (1,), (1,), tensor.storage_offset())
                raw = first.resolve_conj().resolve_neg().view(torch.uint8)
                plain = not (tensor.is_conj() or tensor.is_neg())
                assert not plain or data[info.offset :][: len(raw)] == bytes(raw.tolist())
        shared = archive.info("rows").shared_with
        assert "whole" in shared
        assert "rows" not in shared
        assert archive.info("bool").shared_with == ()
        assert archive.info("whole").record == "data/0"
        assert archive.info("whole").location == "cpu"
        assert archive.info("no elements").offset is None


def test_tied_tensors_keep_their_names(tmp_path: Path) -> None:
    weight = torch.ones(3)
    path = write(tmp_path, {"model": {"in.weight": weight, "out.weight": weight}})
    with ptsave.open(path) as archive:
        for name in ("model.out.weight", ("model", "out.weight")):
            info = archive.info(name)
            assert info.name == "model.out.weight"
            assert info.shared_with == ("model.in.weight",)
        model = archive["model"]
        assert model["in.weight"] is model["out.weight"]


def test_device(tmp_path: Path) -> None:
    path = write(tmp_path, {"weight": torch.ones(3)})
    with ptsave.open(path) as archive:
        assert archive.get_tensor("weight", device="cpu").device.type == "cpu"
        assert archive.get_tensor("weight", torch.device("meta")).device.type == "meta"


def test_location_is_where_it_was_saved(tmp_path: Path) -> None:
    """A file from a machine with accelerators: its location is in the pickle."""
    path = write(tmp_path, {"a": torch.ones(3), "b": torch.zeros(2), "c": torch.ones(1)})
    moved = tmp_path / "moved.pt"
    cpu, cuda = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1"
    records = zip_records(path.read_bytes())
    moved.write_bytes(zipped({name: data.replace(cpu, cuda) for name, data in records.items()}))
    with ptsave.open(moved) as archive:
        assert [info.location for info in archive.infos()] == ["cuda:1"] * 3
        assert torch.equal(archive["a"], torch.ones(3))


def test_metadata(tmp_path: Path) -> None:
    path = write(tmp_path, [1])
    with ptsave.open(path) as archive:
        assert archive.metadata["format"] == "pt"
        assert archive.metadata["byteorder"] == sys.byteorder
        assert archive.metadata["version"] == "3"
        assert archive.keys() == []


def test_lazy_mapping(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    path = write(tmp_path, model.state_dict())
    other = nn.Linear(3, 4)
    with ptsave.open(path) as archive:
        tensors = archive.tensors()
        assert list(tensors) == ["weight", "bias"]
        other.load_state_dict(tensors)
        assert_same_object(dict(tensors), dict(stock_load(path)))
        assert repr(archive) == f"<ptsave.Archive {str(path)!r}>"


# ------------------------------------------------------------------------------------------ slices

INDICES: list[Any] = [
    3,
    -1,
    slice(5, 9),
    slice(None, None, 50),
    (slice(2, 4), slice(100, 120)),
    (slice(None, None, 60), 7),
    (..., 3),
    (None, 5, None, slice(0, 2)),
    slice(7, 7),
    (2, 3),
    ...,
    (slice(-3, None), slice(None, -690)),
]


@pytest.mark.parametrize("name", ["whole", "transposed", "columns", "steps"])
def test_slices(name: str, tmp_path: Path) -> None:
    tensor = views()[name]
    with ptsave.open(write(tmp_path, views())) as archive:
        part = archive.get_slice(name)
        assert part.shape == tensor.shape
        assert part.get_shape() == list(tensor.shape)
        for index in INDICES:
            try:
                expected = tensor[index]
            except IndexError:
                with pytest.raises(IndexError):
                    part[index]
            else:
                assert torch.equal(part[index], expected), index
        nothing: list[Any] = [[0, 1], torch.tensor([0]), True, "a", (0, [1])]
        for index in nothing:
            with pytest.raises(TypeError, match="an index may contain only integers"):
                part[index]


def test_blocks_hold_what_a_view_needs() -> None:
    storage = torch.arange(4000, dtype=torch.int16)
    shapes = itertools.product([1, 2, 5], [1, 3], [2, 4])
    strides = itertools.product([1, 7, 200], [0, 2, 31], [1, 64, 500])
    for shape, stride, gap in itertools.product(shapes, strides, [0, 10, 500]):
        view = storage.as_strided(shape, stride, 9)
        blocks = blocks_of(view, gap)
        raw = storage.view(torch.uint8)
        packed = torch.cat([raw[begin : begin + blocks.nbytes] for begin in blocks.begins])
        found = packed.view(torch.int16).as_strided(shape, blocks.stride, 0)
        assert torch.equal(found, view), (shape, stride, gap)
        assert len(packed) <= max(raw.numel(), view.nbytes)


def test_reads_only_what_it_needs(tmp_path: Path) -> None:
    obj = {"big": torch.arange(4 << 20, dtype=torch.int64), "small": torch.ones(1000)}
    path = write(tmp_path, obj)
    before = nbytes_read()
    with ptsave.open(path) as archive:
        archive.infos()
        assert nbytes_read() - before < 200_000
        archive.get_tensor("small")
        part = archive.get_slice("big")[1 << 20 : (1 << 20) + 1000]
        assert part[0] == 1 << 20
        assert nbytes_read() - before < 300_000


def test_scattered_views_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, {"big": BIG, "column": BIG[:, 5], "imaginary": views()["imaginary"]})
    monkeypatch.setattr("ptsave.archive.spans._MAX_SPARSE_NBYTES", 5000)
    with ptsave.open(path) as archive:
        assert torch.equal(archive.get_tensor("column", verify=True), BIG[:, 5])
        assert torch.equal(archive.get_slice("big")[::2, 7:9], BIG[::2, 7:9])
        assert torch.equal(archive.get_slice("big")[:, -1], BIG[:, -1])


# ----------------------------------------------------------------------------- damage and checksums


def damaged(folder: Path) -> Path:
    path = write(folder, {"good": torch.ones(100_000), "bad": BIG, "also": torch.ones(5)})
    flip(path, BIG[200].numpy().tobytes())
    return path


def test_damage_is_found(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    with ptsave.open(path) as archive:
        assert torch.equal(archive["good"], torch.ones(100_000))
        with pytest.raises(ptsave.CorruptCheckpointError, match="used by bad") as caught:
            archive["bad"]
        assert caught.value.record == "data/1"
        with pytest.raises(ptsave.CorruptCheckpointError, match="used by bad"):
            archive[""]
        with pytest.raises(ptsave.CorruptCheckpointError, match="used by bad"):
            archive.verify()
        rows = archive.get_slice("bad")[:3]
        assert torch.equal(rows, BIG[:3])
        with pytest.raises(ptsave.CorruptCheckpointError, match="used by bad"):
            archive.get_slice("bad", verify=True)[:3]
        assert archive.get_tensor("bad", verify=False).shape == BIG.shape
    with ptsave.open(path, verify=False) as archive:
        assert archive["bad"].shape == BIG.shape
        with pytest.raises(ptsave.CorruptCheckpointError):
            archive.get_tensor("bad", verify=True)


def test_damaged_pickle(tmp_path: Path) -> None:
    path = write(tmp_path, {"weight": torch.ones(3)})
    flip(path, b"weight")
    with pytest.raises(ptsave.CorruptCheckpointError, match=r"data\.pkl"):
        ptsave.open(path)


def test_verify_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_without_checksums({"weight": BIG}, path)
    with ptsave.open(path) as archive:
        assert torch.equal(archive["weight"], BIG)
        with pytest.warns(ptsave.CheckpointWarning, match="without checksums"):
            archive.verify()


def test_only_the_restricted_machine_runs(tmp_path: Path) -> None:
    path = write(tmp_path, {"random": random.Random(0), "weight": torch.ones(1)})
    with ptsave.open(path) as archive:
        assert archive["weight"].tolist() == [1]
        with pytest.raises(pickle.UnpicklingError, match=r"needs random\.Random, which"):
            archive["random"]


# ------------------------------------------------------------------------- files, threads, closing


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_stream_that_nobody_else_holds(kind: str) -> None:
    """Its memory stays while the archive does, and cannot be moved meanwhile."""
    weight = torch.arange(3000.0)
    stream = io.BytesIO()
    torch.save({"weight": weight}, stream)
    if kind == "safetensors":
        stream = io.BytesIO(safetensors_save({"weight": weight}))
    stream.seek(0)
    archive = ptsave.open(stream)
    with pytest.raises(BufferError):
        stream.truncate(0)
    del stream
    gc.collect()
    others = [bytearray(13_000) for _ in range(100)]
    assert torch.equal(archive.get_tensor("weight"), weight)
    assert torch.equal(archive.get_slice("weight")[5:9], weight[5:9])
    del others


def test_a_stream_may_change_when_the_archive_is_closed() -> None:
    stream = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, stream)
    with ptsave.open(io.BytesIO(stream.getvalue())):
        pass
    stream.seek(0)
    with ptsave.open(stream) as archive:
        weight = archive["weight"]
    del archive
    gc.collect()
    stream.truncate(0)
    assert weight.tolist() == [1, 1, 1]


def test_file_may_be_closed_and_removed(tmp_path: Path) -> None:
    path = write(tmp_path, {"weight": BIG})
    with path.open("rb") as stream:
        archive = ptsave.open(stream)
    path.unlink()
    with archive:
        assert torch.equal(archive["weight"], BIG)


def test_many_threads(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((5000,), float(i)) for i in range(200)}
    path = write(tmp_path, tensors)
    with ptsave.open(path) as archive, ThreadPoolExecutor(8) as pool:
        names = list(tensors) * 3
        for name, found in zip(names, pool.map(archive.get_tensor, names), strict=True):
            assert torch.equal(found, tensors[name])
        for infos in pool.map(lambda _: archive.infos(), range(8)):
            assert len(infos) == 200


def test_closing_closes_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, views())
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with ptsave.open(path) as archive:
        archive[""]
        archive.infos()
        archive.verify()
    assert os.listdir("/proc/self/fd") == before


def test_closing(tmp_path: Path) -> None:
    path = write(tmp_path, {"weight": BIG})
    archive = ptsave.open(path)
    part = archive.get_slice("weight")
    read = archive["weight"]
    archive.close()
    archive.close()
    assert archive.closed
    assert repr(archive).endswith("(closed)>")
    assert torch.equal(read, BIG)
    assert torch.equal(part[3], BIG[3])  # whoever has a slice keeps the file
    calls: list[Callable[[], object]] = [
        archive.keys,
        archive.infos,
        archive.verify,
        lambda: list(archive.tensors()),
        lambda: archive["weight"],
        lambda: archive.get_tensor("weight"),
        lambda: archive.get_slice("weight"),
        lambda: archive.info("weight"),
        lambda: archive.metadata,
        archive.__enter__,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="the archive is closed"):
            call()


def test_closing_while_others_read(tmp_path: Path) -> None:
    path = write(tmp_path, {f"t{i}": BIG for i in range(20)})
    for _ in range(5):
        archive = ptsave.open(path)
        outcomes: list[bool] = []

        def read(archive: ptsave.Archive = archive, outcomes: list[bool] = outcomes) -> None:
            try:
                for name in archive.keys() * 10:
                    outcomes.append(torch.equal(archive.get_tensor(name), BIG))
            except ValueError as error:
                outcomes.append("the archive is closed" in str(error))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        archive.close()
        for thread in threads:
            thread.join()
        assert all(outcomes)


# ---------------------------------------------------------------------- files that load as a whole


def whole_files(folder: Path) -> dict[str, Path]:
    obj = {"weight": BIG, "rows": BIG[2:4], "step": 3}
    legacy = folder / "legacy.pt"
    stock_save(obj, legacy, _use_new_zipfile_serialization=False)
    plain = write(folder, obj)
    compressed = folder / "compressed.pt"
    compressed.write_bytes(deflated(plain.read_bytes()))
    sparse = write(folder, {**obj, "sparse": torch.eye(3).to_sparse()}, "sparse.pt")
    return {"legacy": legacy, "compressed": compressed, "sparse": sparse}


@pytest.mark.parametrize("kind", ["legacy", "compressed", "sparse"])
def test_files_that_load_as_a_whole(kind: str, tmp_path: Path) -> None:
    path = whole_files(tmp_path)[kind]
    with ptsave.open(path) as archive:
        assert archive.keys()[:2] == ["weight", "rows"]
        assert torch.equal(archive["weight"], BIG)
        assert torch.equal(archive.get_slice("rows")[1], BIG[3])
        assert archive["step"] == 3
        info = archive.info("rows")
        assert (info.location, info.offset, info.shared_with) == ("cpu", None, ("weight",))
        archive.verify()
        if kind == "sparse":
            assert torch.equal(archive["sparse"].to_dense(), torch.eye(3))
            assert archive.info("sparse").stride == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_of_no_shape_or_strides(tmp_path: Path) -> None:
    """Nested, sparse and meta tensors, which a file that has them is loaded for as a whole."""
    parts = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)]
    obj = {
        "nested": torch.nested.nested_tensor(parts),
        "rows": torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
        "jagged": torch.nested.nested_tensor(parts, layout=torch.jagged),
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.ones(2, 3, device="meta"),
    }
    shapes = {"nested": (2, -1, 3), "rows": (2, 2), "jagged": (2, -1, 3), "meta": (2, 3)}
    path = write(tmp_path, obj)
    with ptsave.open(path) as archive:
        for info in archive.infos():
            shape = shapes.get(str(info.name), (3, 3))
            assert (info.shape, info.nbytes > 0) == (shape, True)
            assert archive.get_slice(info.name).shape == shape
            assert (info.stride == ()) == (info.name != "meta")
        assert all(torch.equal(archive.get_slice("nested")[i], parts[i]) for i in (0, 1))
        for name in ("coo", "csr"):
            row = archive.get_slice(name)[1]
            assert row.layout == obj[name][1].layout
            assert row.to_dense().tolist() == [0, 1, 0]
        assert archive.get_slice("meta")[0].is_meta


# ------------------------------------------------------------------------------------- safetensors


def test_import_costs_neither_fsspec_nor_safetensors() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import ptsave; "
        "print({'fsspec', 'safetensors'} & (set(sys.modules) - before))"
    )
    assert run_python(code).stdout == "set()\n"
