"""`ptsave convert`: the same files as those of the libraries, and nothing lost without a word."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import fsspec
import pytest
import torch
from _corruption import flip, offset_of
from _system import Child, mounted
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from stock_comparison import (
    Calls,
    assert_same_object,
    deflated,
    save_without_checksums,
    saved_bytes,
)
from torch import Tensor
from torch.utils.serialization import config as _config

import ptsave
from ptsave.archive.spans import unfilled_tensors
from ptsave.contents.safetensors_fields import let_library_read
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.errors import CorruptCheckpointError
from ptsave.streaming import payload_sources

config: Any = _config  # a module with methods, which type checkers do not know

METADATA = {"format": "pt"}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


succeed = partial(command_line.succeed, "convert")
fail = partial(command_line.fail, "convert")


def bits_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat.reshape(-1).view(torch.uint8)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits_of(found[name]), bits_of(tensor))


def random_tensors() -> dict[str, Tensor]:
    """Many dtypes, shapes and names, in no order that a format would have."""
    tensors = {}
    for i, dtype in enumerate(DTYPES):
        shape = [(), (3,), (0, 4), (5, 7), (1, 2, 3)][i % 5]
        raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensors[f"{(i * 7) % 13}.{dtype}"] = raw.view(dtype).reshape(shape)
    tensors['é "quoted"\n\x1f'] = torch.randn(1000)
    tensors["large"] = torch.randn(1_500_000)
    return tensors


def nothing_but(folder: Path, *names: str) -> bool:
    return sorted(os.listdir(folder)) == sorted(names)


# --------------------------------------------------------------------- the same files as others'


@pytest.mark.parametrize("threads", ["1", "4"])
def test_safetensors_as_the_library_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    monkeypatch.setenv("PTSAVE_NUM_THREADS", threads)
    tensors = random_tensors()
    torch.save(tensors, tmp_path / "a.pt")
    save_file(tensors, tmp_path / "expected.safetensors", METADATA)
    result = succeed(tmp_path / "a.pt", tmp_path / "a.safetensors", "--no-checksums")
    written = (tmp_path / "a.safetensors").read_bytes()
    assert written == (tmp_path / "expected.safetensors").read_bytes()
    assert result.stderr == ""
    assert f"wrote {tmp_path}/a.safetensors: {len(tensors)} tensors, " in result.stdout


def test_pickles_as_torch_writes_them(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "a.safetensors", METADATA)
    succeed(tmp_path / "a.safetensors", tmp_path / "a.pt")
    (tmp_path / "stock").mkdir()
    loaded = {
        name: tensor.clone() for name, tensor in load_file(tmp_path / "a.safetensors").items()
    }
    found = torch.load(tmp_path / "a.pt")
    # The library gives empty tensors in any order.
    assert [n for n in found if found[n].numel()] == [n for n in loaded if loaded[n].numel()]
    loaded = {name: loaded[name] for name in found}
    torch.save(loaded, tmp_path / "stock" / "a.pt")  # the file's name is in the file
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "stock" / "a.pt").read_bytes()


@pytest.mark.parametrize("direct", [False, True])
def test_page_cache_and_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    tensors = {str(i): torch.randn(3_000_001 // (i + 1)) for i in range(8)}
    torch.save(tensors, tmp_path / "a.pt")
    if direct:
        with (tmp_path / "a.pt").open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        monkeypatch.setenv("PTSAVE_DIRECT_IO", "0")
    options = ["--fsync"] if direct else []
    succeed(tmp_path / "a.pt", tmp_path / "b.safetensors", *options)
    check_same(load_file(tmp_path / "b.safetensors"), tensors)
    succeed(tmp_path / "b.safetensors", tmp_path / "c.pt", *options)
    check_same(torch.load(tmp_path / "c.pt"), tensors)


def test_empty_checkpoint(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt")
    save_file({}, tmp_path / "expected.safetensors", METADATA)
    succeed(tmp_path / "a.pt", tmp_path / "a.safetensors")
    expected = (tmp_path / "expected.safetensors").read_bytes()
    assert (tmp_path / "a.safetensors").read_bytes() == expected
    succeed(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt") == {}


def test_pickle_to_pickle_keeps_the_object(tmp_path: Path) -> None:
    base = torch.randn(10)
    obj = OrderedDict(a=base[2:5], b=[base, {"step": 7}], c=torch.nn.Parameter(torch.ones(2)))
    obj._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    (tmp_path / "stock").mkdir()
    torch.save(obj, tmp_path / "a.pt")
    torch.save(obj, tmp_path / "stock" / "b.pth")
    assert succeed(tmp_path / "a.pt", tmp_path / "b.pth").stderr == ""
    assert (tmp_path / "b.pth").read_bytes() == (tmp_path / "stock" / "b.pth").read_bytes()


@pytest.mark.parametrize("command", [convert, compact])
def test_locations_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., object]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
        torch.save({"a": torch.arange(1000)[5:8], "b": torch.ones(2)}, tmp_path / "a.pt")
    command(tmp_path / "a.pt", tmp_path / "b.pt")
    with ptsave.open(tmp_path / "b.pt") as archive:
        assert [info.location for info in archive.infos()] == ["cuda:1", "cuda:1"]
        assert archive["a"].tolist() == [5, 6, 7]


# ---------------------------------------------------------------------- what needs rearranging


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_sources, "_PIECE_NBYTES", 1000)


@pytest.mark.parametrize("alignment", [1, 8, 4096])
def test_storages_at_any_place(tmp_path: Path, alignment: int) -> None:
    tensors = {"a": torch.randn(7), "b": torch.ones(3, dtype=torch.uint8), "c": torch.randn(9)[2:4]}
    config.save.storage_alignment = alignment  # what it was is put back after each test
    torch.save(tensors, tmp_path / "a.pt")
    config.save.storage_alignment = 64
    for target in ("b.safetensors", "b.pt"):
        succeed(tmp_path / "a.pt", tmp_path / target)
    check_same(load_file(tmp_path / "b.safetensors"), tensors)
    check_same(torch.load(tmp_path / "b.pt"), tensors)
    found = compact(tmp_path / "a.pt", tmp_path / "c.pt")
    assert found.n_storages == 1
    check_same(torch.load(tmp_path / "c.pt"), tensors)


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("legacy", [False, True])
def test_strides_sharing_and_lazy_bits(tmp_path: Path, legacy: bool) -> None:
    base = torch.randn(60, 50)
    complex_base = torch.randn(30, dtype=torch.complex64)
    tensors = {
        "transposed": base.t(),
        "columns": base[:, 3:17],
        "every third": base[::3],
        "permuted": torch.randn(5, 6, 70).permute(2, 0, 1),
        "expanded": torch.randn(1, 40).expand(300, 40),
        "scalar expanded": torch.tensor(3.0).expand(1000),
        "conjugate": complex_base.conj(),
        "negative": torch._neg_view(torch.randn(40)),
        "rows": base[10:20],
        "all": base,
        "again": base,
        "empty": base[5:5],
    }
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    result = succeed(tmp_path / "a.pt", tmp_path / "a.safetensors")
    expected = {name: tensor.resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    check_same(load_file(tmp_path / "a.safetensors"), expected)
    assert "not contiguous" in result.stderr
    assert "share memory" in result.stderr
    assert nothing_but(tmp_path, "a.pt", "a.safetensors")


def test_remarks_and_quiet(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    torch.save({"model": model.state_dict(), "own": [model.weight]}, tmp_path / "a.pt")
    result = succeed(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert set(load_file(tmp_path / "a.safetensors")) == {"model.weight", "model.bias", "own.0"}
    for words in (
        "within containers",
        "requires_grad",
        "own.0 shares memory",
        "_metadata of model",
    ):
        assert words in result.stderr
    result = succeed(tmp_path / "a.pt", tmp_path / "a.safetensors", "--force", "--quiet")
    assert result.output == ""


def test_metadata(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt", "who": "me"})
    result = succeed(tmp_path / "a.safetensors", tmp_path / "a.pt")
    assert "__metadata__ has no place in a .pt file: format, who" in result.stderr
    succeed(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--no-checksums")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


@pytest.mark.parametrize("target", ["a.pt", "pickled"])
def test_tied_weights_that_only_metadata_names(tmp_path: Path, target: str) -> None:
    weight = torch.randn(3, 4)
    ptsave.save_model({"embedding": weight, "head": weight}, tmp_path / "model")
    result = succeed(tmp_path / "model", tmp_path / target, "--format", "pt")
    assert "head is embedding according to the metadata" in result.stderr
    assert "2 tensors" in result.stdout
    path = tmp_path / target
    found = torch.load(path / "pytorch_model.bin" if path.is_dir() else path)
    check_same(found, {"embedding": weight, "head": weight})
    assert found["head"].data_ptr() == found["embedding"].data_ptr()


# ---------------------------------------------------------------------------- what has no place


def test_losses_are_named(tmp_path: Path) -> None:
    obj: dict[str, Any] = {
        "step": 7,
        "nothing": None,
        "sparse": torch.eye(3).to_sparse(),
        "c128": torch.ones(2, dtype=torch.complex128),
        "no items": {},
        "kept": torch.ones(2),
    }
    obj["twice"] = obj["also twice"] = {"x": torch.ones(1)}
    torch.save(obj, tmp_path / "a.pt")
    message = fail(tmp_path / "a.pt", tmp_path / "a.safetensors")
    for words in ("step (int)", "nothing (NoneType)", "sparse (a sparse_coo tensor)", "--drop"):
        assert words in message
    for words in ("c128 (dtype complex128)", "no items (an empty dict)", "the same as twice"):
        assert words in message
    assert nothing_but(tmp_path, "a.pt")
    result = succeed(tmp_path / "a.pt", tmp_path / "a.safetensors", "--drop")
    assert "left out: step (int)" in result.stderr
    expected = {"kept": obj["kept"], "twice.x": torch.ones(1)}
    check_same(load_file(tmp_path / "a.safetensors"), expected)


def test_quantized_and_meta(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        torch.save({"q": quantized, "m": torch.ones(2, device="meta")}, tmp_path / "a.pt")
        message = fail(tmp_path / "a.pt", tmp_path / "a.safetensors")
        assert "q (a quantized tensor)" in message
        assert "m (a tensor on the meta device, without values)" in message
        succeed(tmp_path / "a.pt", tmp_path / "b.pt")
        found = torch.load(tmp_path / "b.pt")["q"]
        assert torch.equal(found.dequantize(), quantized.dequantize())
    torch.save({"m": torch.ones(2, device="meta"), "a": torch.ones(2)}, tmp_path / "c.pt")
    for command in (convert, compact):
        command(tmp_path / "c.pt", tmp_path / "d.pt", force=True)
        found = torch.load(tmp_path / "d.pt")
        assert found["m"].is_meta
        assert found["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        ({"__metadata__": torch.ones(1)}, "rename it"),
        ({"\udcff": torch.ones(1)}, "rename it"),
        (torch.ones(3), "has no name"),
        (7, "the object itself (int)"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, "both get the name 'a.b'"),
    ],
    ids=str,
)
def test_objects_that_only_pickles_hold(tmp_path: Path, obj: Any, words: str) -> None:
    torch.save(obj, tmp_path / "a.pt")
    options = ["--drop"] if "both" in words else []
    assert words in fail(tmp_path / "a.pt", tmp_path / "a.safetensors", *options)
    assert nothing_but(tmp_path, "a.pt")
    succeed(tmp_path / "a.pt", tmp_path / "b.pt")
    assert_same_object(torch.load(tmp_path / "b.pt"), obj)


# ------------------------------------------------------------------------------------ directories


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_shards_as_save_model_writes_them(tmp_path: Path, kind: Any) -> None:
    tensors = {f"layer.{i}.weight": torch.randn(1000 + i) for i in range(10)}
    torch.save(tensors, tmp_path / "a.pt")
    limit = ["--max-shard-size", "12KB"]
    succeed(tmp_path / "a.pt", tmp_path / "found", "--format", kind, *limit)
    ptsave.save_model(tensors, tmp_path / "expected", max_shard_size="12KB", format=kind)
    names = sorted(os.listdir(tmp_path / "expected"))
    assert nothing_but(tmp_path / "found", *names)
    for name in names:
        found = (tmp_path / "found" / name).read_bytes()
        assert found == (tmp_path / "expected" / name).read_bytes()
    succeed(tmp_path / "found", tmp_path / "b.pt")
    check_same(torch.load(tmp_path / "b.pt"), tensors)
    index = next(name for name in names if name.endswith(".json"))
    succeed(tmp_path / "found" / index, tmp_path / "b.safetensors")
    check_same(load_file(tmp_path / "b.safetensors"), tensors)


def test_one_shard(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.ones(2)}
    torch.save(tensors, tmp_path / "a.pt")
    succeed(tmp_path / "a.pt", f"{tmp_path}/found/")
    assert nothing_but(tmp_path / "found", "model.safetensors")
    check_same(load_file(tmp_path / "found" / "model.safetensors"), tensors)


def test_views_in_pickled_shards(tmp_path: Path) -> None:
    base = torch.randn(4, 1000)
    tensors = {"q": base[0], "k": base[1], "tied": base[0], "t": base.t(), "all": base}
    torch.save(tensors, tmp_path / "a.pt")
    succeed(tmp_path / "a.pt", tmp_path / "s", "--format", "pt", "--max-shard-size", "8000")
    assert sum(path.stat().st_size for path in (tmp_path / "s").iterdir()) < 50_000
    succeed(tmp_path / "s", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    check_same({name: found[name] for name in tensors}, tensors)
    assert found["q"].data_ptr() == found["tied"].data_ptr()


def test_remarks_on_ties_are_true(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    tensors = {"a": weight, "b": weight[:], "part": weight[1:], "c": weight, "t": weight.t()}
    torch.save(tensors, tmp_path / "a.pt")
    result = succeed(tmp_path / "a.pt", tmp_path / "shards", "--format", "pt")
    assert "part, t share memory with others" in result.stderr
    found = torch.load(tmp_path / "shards" / "pytorch_model.bin")
    check_same(found, tensors)
    groups: dict[int, list[str]] = {}
    for name, tensor in found.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    assert [*groups.values()] == [["a", "b", "c"], ["part"], ["t"]]
    result = succeed(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert "b, part, c, t share memory with others" in result.stderr


def test_shards_of_another_kind(tmp_path: Path) -> None:
    tensors = {str(i): torch.randn(100) for i in range(6)}
    ptsave.save_model(tensors, tmp_path / "m", max_shard_size="1KB", format="pt")
    succeed(tmp_path / "m" / "pytorch_model.bin.index.json", tmp_path / "m")
    check_same(load_file(tmp_path / "m" / "model.safetensors"), tensors)
    assert "--force" in fail(tmp_path / "m", tmp_path / "m")
    assert "a file of the source" in fail(tmp_path / "m", tmp_path / "m", "--force")
    succeed(tmp_path / "m", tmp_path / "m", "--format", "pt", "--force")
    check_same(torch.load(tmp_path / "m" / "pytorch_model.bin"), tensors)
    assert nothing_but(tmp_path / "m", "model.safetensors", "pytorch_model.bin")


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    ptsave.save_model({str(i): torch.ones(100) for i in range(4)}, tmp_path, max_shard_size=900)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["more"] = index["weight_map"]["0"]
    path.write_text(json.dumps(index))
    assert "tensor more is not in this shard" in fail(tmp_path, tmp_path / "out.pt")


# --------------------------------------------------------------------------- what only loads whole


@pytest.mark.parametrize("target", ["b.pt", "b.safetensors"])
def test_old_and_compressed_files(tmp_path: Path, target: str) -> None:
    tensors = {"a": torch.randn(100), "b": torch.randn(3, 4)}
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "packed.pt").write_bytes(deflated(saved_bytes(torch.save, tensors)))
    for source in ("old.pt", "packed.pt"):
        succeed(tmp_path / source, tmp_path / target, "--force")
        load: Any = load_file if target.endswith("safetensors") else torch.load
        check_same(load(tmp_path / target), tensors)


def test_urls(tmp_path: Path) -> None:
    """What `convert` does there is in models/test_url_models.py."""
    tensors = {"a": torch.randn(1000)}
    torch.save(tensors, tmp_path / "a.pt")
    save_file(tensors, tmp_path / "a.safetensors")
    memory = fsspec.filesystem("memory")
    memory.pipe("/convert/a.safetensors", (tmp_path / "a.safetensors").read_bytes())
    succeed("memory://convert/a.safetensors", tmp_path / "b.pt")
    check_same(torch.load(tmp_path / "b.pt"), tensors)
    succeed(tmp_path / "a.pt", "memory://convert/new/a.pt")
    assert memory.cat("/convert/new/a.pt") == (tmp_path / "a.pt").read_bytes()
    assert "exists already" in fail(tmp_path / "a.pt", "memory://convert/new/a.pt")
    assert "cannot write to web servers" in fail(tmp_path / "a.pt", "http://localhost:1/c.pt")
    flip(tmp_path / "a.pt", bytes(bits_of(tensors["a"]).tolist()))
    memory.pipe("/convert/damaged.pt", (tmp_path / "a.pt").read_bytes())
    assert "memory://convert/damaged.pt: record data/0" in fail(
        "memory://convert/damaged.pt", tmp_path / "c.safetensors"
    )
    message = fail(tmp_path / "a.pt", tmp_path / "c.safetensors")
    assert "Restore the file from a copy. (`ptsave verify FILE` lists" in message
    assert "verify=False" not in message  # convert has no such option
    assert not (tmp_path / "c.safetensors").exists()


# ----------------------------------------------------------------------------------------- damage


def damaged(tmp_path: Path, tensors: dict[str, Tensor], name: str) -> Path:
    """Return a file in which one byte of a tensor is another one."""
    path = tmp_path / "damaged.pt"
    torch.save(tensors, path)
    flip(path, offset_of(path, name))
    return path


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *(("out.safetensors", "large"), ("out.safetensors", "part"), ("out.pt", "small")),
        *(("out.pt", "large"), ("out", "small"), ("out-pt", "part")),
    ],
)
def test_damage(tmp_path: Path, target: str, name: str) -> None:
    tensors = {"large": torch.randn(3_000_000), "small": torch.ones(5), "x": torch.ones(3)}
    tensors["part"] = torch.randn(10)[2:5]
    path = damaged(tmp_path, tensors, name)
    options = ["--format", "pt"] if target == "out-pt" else []
    message = fail(path, tmp_path / target, *options)
    number = [*tensors].index(name)
    assert f"record data/{number} at offset" in message
    assert f"used by {name}" in message
    assert nothing_but(tmp_path, "damaged.pt")
    if "." in target:
        (tmp_path / target).write_text("old")
        with pytest.raises(CorruptCheckpointError) as caught:
            convert(path, tmp_path / target, force=True)
        assert (caught.value.record, caught.value.entries) == (f"data/{number}", [name])
        assert (tmp_path / target).read_text() == "old"


@pytest.mark.parametrize("target", ["out.safetensors", "out.pt"])
def test_damaged_header_of_a_record(tmp_path: Path, target: str) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        offset = archive.getinfo("a/data/0").header_offset
    with open(tmp_path / "a.pt", "r+b") as stream:
        stream.seek(offset)
        stream.write(b"QQ")
    with pytest.raises(CorruptCheckpointError, match="data/0"):
        convert(tmp_path / "a.pt", tmp_path / target)
    with pytest.raises(CorruptCheckpointError, match="data/0"):
        compact(tmp_path / "a.pt", tmp_path / target)
    assert nothing_but(tmp_path, "a.pt")


def test_no_checksums(tmp_path: Path) -> None:
    save_without_checksums({"a": torch.ones(20)}, tmp_path / "a.pt")
    result = succeed(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert "has no checksums" in result.stderr
    check_same(load_file(tmp_path / "a.safetensors"), {"a": torch.ones(20)})


# ------------------------------------------------------------------------------------ bad arguments


def test_sources_that_are_refused(tmp_path: Path) -> None:
    torch.save({"a": Calls(os.getcwd)}, tmp_path / "evil.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "script.pt")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    cases = {
        "evil.pt": "cannot hold a (posix.getcwd)",
        "script.pt": "TorchScript",
        "folder": "no *.safetensors",
        "pipe.pt": "this is a pipe",
        "missing.pt": "No such file",
    }
    for name, words in cases.items():
        assert words in fail(tmp_path / name, tmp_path / "out.safetensors")
    assert nothing_but(tmp_path, "evil.pt", "script.pt", "folder", "pipe.pt")


def test_targets_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path)
    before = path.read_bytes()
    (tmp_path / "link.pt").symlink_to(path)
    (tmp_path / "b.pt").write_text("old")
    ptsave.save_model({"a": torch.ones(1)}, tmp_path / "model")
    ptsave.save_model({"a": torch.ones(1)}, tmp_path / "pickled", format="pt")
    cases: list[tuple[list[object], str]] = [
        ([path, path, "--force"], "the target is the source itself"),
        ([path, tmp_path / "link.pt", "--force"], "the target is the source itself"),
        ([path, tmp_path / "b.pt"], "--force"),
        ([path, tmp_path / "model"], "--force"),
        ([tmp_path / "model" / "model.safetensors", tmp_path / "model", "--force"], "the source"),
        ([path, tmp_path / "b.xyz"], "--format"),
        ([path, tmp_path / "c.pt", "--format", "safetensors"], "not for the format"),
        ([path, tmp_path / "c.pt", "--max-shard-size", "5GB"], "for directories"),
        ([path, tmp_path / "dir", "--max-shard-size", "much"], "max_shard_size must be"),
        ([path, tmp_path / "no" / "c.pt"], "no such directory"),
        ([path, "/dev/null", "--force"], "not a directory"),
        ([path, f"{path}/"], "a.pt: exists and is not a directory"),
    ]
    for arguments, words in cases:
        assert words in fail(*arguments)
    assert path.read_bytes() == before
    assert (tmp_path / "b.pt").read_text() == "old"
    assert nothing_but(tmp_path, "a.pt", "b.pt", "link.pt", "model", "pickled")
    succeed(path, tmp_path / "b.pt", "--force")
    succeed(path, tmp_path / "b.xyz", "--format", "safetensors")
    result = succeed(path, tmp_path / "pickled")  # the other format is left alone
    assert "pytorch_model.bin is in the directory, too" in result.stderr
    assert nothing_but(tmp_path / "pickled", "model.safetensors", "pytorch_model.bin")


# -------------------------------------------------------------------------- memory, disks, signals


_PEAK = """
import sys, torch, ptsave, safetensors.torch
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10
before = peak()
for source, target in zip(sys.argv[1:], sys.argv[2:]):
    ptsave.convert(source, target)
    print(peak() - before)
"""


def test_files_larger_than_memory(tmp_path: Path) -> None:
    nbytes = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tensors = unfilled_tensors([(torch.uint8, (nbytes,)), (torch.float32, (3,))])
    with torch.serialization.skip_data():
        ptsave.save({"large": tensors[0], "small": tensors[1]}, tmp_path / "a.pt")  # all hole
    with ptsave.open(tmp_path / "a.pt") as archive:
        assert archive.info("large").nbytes == nbytes
        assert archive.get_tensor("small").tolist() == [0, 0, 0]
    done = compact(tmp_path / "a.pt", dry_run=True)
    assert done.nbytes > nbytes


def test_memory_stays_small(tmp_path: Path) -> None:
    torch.save({str(i): torch.ones(8 << 20) for i in range(4)}, tmp_path / "a.pt")
    paths = [f"{tmp_path}/{name}" for name in ("a.pt", "b.safetensors", "c.pt")]
    command = [sys.executable, "-c", _PEAK, *paths]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    for nbytes in map(int, result.stdout.split()):
        assert nbytes < 64 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "none") as disk:
        yield disk


def limited(limit: str, *arguments: object) -> str:
    """Run the program under a limit of the system; return what it says, in one line."""
    command = [sys.executable, "-m", "ptsave", "convert", *map(str, arguments)]
    script = f'ulimit {limit}; exec "$@"'
    command = ["bash", "-c", script, "_", *command]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_limits_of_the_system(tmp_path: Path) -> None:
    source, target = tmp_path / "shards", tmp_path / "out.safetensors"
    ptsave.save_model({str(i): torch.ones(1000) for i in range(80)}, source, max_shard_size=1)
    message = limited("-n 64", source, target)
    assert "model-000" in message
    assert "Too many open files" in message
    message = limited("-f 100", source, target)
    assert "out.safetensors: " in message
    assert "File too large" in message
    assert nothing_but(tmp_path, "shards")


def test_headers_of_files_larger_than_memory() -> None:
    entry = {"dtype": "U8", "shape": [1 << 45], "data_offsets": [0, 1 << 45]}
    header = json.dumps({"a": entry}).encode()
    header = len(header).to_bytes(8, "little") + header
    let_library_read(header, len(header) + (1 << 45), "large.safetensors")
    with pytest.raises(SafetensorError):
        let_library_read(header, len(header), "cut.safetensors")


@pytest.mark.parametrize(
    ("target", "kind"), [("b.safetensors", "transposed"), ("b.pt", "plain"), ("b", "plain")]
)
def test_full_disk(tmp_path: Path, small_disk: Path, target: str, kind: str) -> None:
    tensor = torch.randn(1000, 3000)
    torch.save({"a": tensor if kind == "plain" else tensor.t()}, tmp_path / "a.pt")
    assert "No space left" in fail(tmp_path / "a.pt", small_disk / target)
    assert nothing_but(small_disk)


def test_interrupted_and_killed(tmp_path: Path) -> None:
    tensors = {str(i): torch.randn(500_000) for i in range(8)}
    torch.save(tensors, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "expected.safetensors")
    expected = (tmp_path / "expected.safetensors").read_bytes()
    target = tmp_path / "b.safetensors"
    chance = random.Random(0)
    begun, sink = os.pipe()

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(sink, b"!")

    for i in range(9):
        child = Child(
            partial(convert, tmp_path / "a.pt", target, force=True, fsync=i % 2 == 0),
            begin,
        )
        os.read(begun, 1)  # before that an interrupt would be one of pytest
        time.sleep(chance.uniform(0, 0.04))
        os.kill(child.pid, signal.SIGKILL if i % 3 else signal.SIGINT)
        child.wait()
        if target.exists():
            assert target.read_bytes() == expected
    os.close(begun)
    os.close(sink)
    convert(tmp_path / "a.pt", target, force=True)
    assert nothing_but(tmp_path, "a.pt", "b.safetensors", "expected.safetensors")


@pytest.mark.usefixtures("_leaves_nothing_open")
def test_nothing_stays_open(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 3).t()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    path = damaged(tmp_path, {"a": torch.ones(100)}, "a")
    with pytest.raises(CorruptCheckpointError):
        convert(path, tmp_path / "d.pt")


class Counter(torch.nn.Module):
    """A module with state that is no tensor."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize(
    "state", [{"n": 3, "seen": torch.arange(4)}, b"", None, date(2026, 11, 26)], ids=str
)
def test_extra_state_of_modules(tmp_path: Path, state: object) -> None:
    """To safetensors and back, as `save_model` has it, in a file and in shards."""
    torch.save(torch.nn.Sequential(Counter(state)).state_dict(), tmp_path / "a.pt")
    for name in ("b.safetensors", "shards"):
        convert(tmp_path / "a.pt", tmp_path / name)
        loaded = torch.nn.Sequential(Counter("other"))
        assert not ptsave.load_model(loaded, tmp_path / name).missing_keys
        assert str(loaded[0].state) == str(state)
        done = convert(tmp_path / name, tmp_path / "c.pt", force=True)
        assert done.remarks == []
        loaded = torch.nn.Sequential(Counter("other"))
        loaded.load_state_dict(torch.load(tmp_path / "c.pt", weights_only=False))
        assert str(loaded[0].state) == str(state)


def test_extra_state_that_would_run_code(tmp_path: Path) -> None:
    torch.save(Counter(partial(print, 1)).state_dict(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"cannot hold _extra_state \(functools.partial\)"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
