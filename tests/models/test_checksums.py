"""Checksums in safetensors files: who writes them, who compares them, and what wrong ones do."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run, succeed
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ptsave
from ptsave import CorruptCheckpointError
from ptsave.contents.safetensors import safetensors_dtypes
from ptsave.contents.safetensors_fields import CHECKSUMS

KEY = "ptsave.crc32"


def can_copy(dtype: torch.dtype) -> bool:
    """Whether torch can copy the dtype: 2.9 cannot copy the packed type of 4 bits."""
    try:
        torch.empty(1, dtype=dtype).clone()
    except NotImplementedError:
        return False
    return True


def tensors_of_all_dtypes() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {
        f"of {str(dtype).removeprefix('torch.')}": torch.randint(
            0, 256, (24, 8), dtype=torch.uint8
        ).view(dtype)
        for dtype in safetensors_dtypes()
        if dtype is not torch.bool and can_copy(dtype)
    }
    found |= {"empty": torch.empty(0, 3), "bool": torch.tensor([True, False])}
    return found | {"large": torch.randn(3 << 20), "zero": torch.tensor(0.0)}


def parts_of(data: bytes) -> tuple[dict[str, Any], list[tuple[str, int, int]]]:
    """Return the metadata of a file, and (name, begin, end) of each tensor in order."""
    first = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:first])
    metadata = header.pop("__metadata__", {})
    fields = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    places = [(name, *entry["data_offsets"]) for name, entry in fields]
    return metadata, [(name, first + begin, first + end) for name, begin, end in places]


def expected_digits(data: bytes) -> str:
    return "".join(f"{zlib.crc32(data[begin:end]):08x}" for _, begin, end in parts_of(data)[1])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


class Model(nn.Module):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.zeros_like(tensor))


@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.parametrize("direct", ["0", "1"])
def test_the_digits_are_those_of_zlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str, direct: str
) -> None:
    monkeypatch.setenv("PTSAVE_NUM_THREADS", threads)
    monkeypatch.setenv("PTSAVE_DIRECT_IO", direct)
    tensors = tensors_of_all_dtypes()
    torch.save(tensors, tmp_path / "a.pt")
    save_file(tensors, tmp_path / "stock.safetensors", {"format": "pt"})
    ptsave.save_model(tensors, tmp_path / "a.safetensors", fsync=True)
    ptsave.save_model(tensors, "memory://checksums/a.safetensors")
    ptsave.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    ptsave.convert(tmp_path / "stock.safetensors", tmp_path / "c.safetensors")
    ptsave.convert(tmp_path / "a.safetensors", tmp_path / "d.safetensors")
    with ptsave.installed(safetensors=True, checksums=True):
        save_file(tensors, tmp_path / "e.safetensors", {"format": "pt"})
    data = (tmp_path / "a.safetensors").read_bytes()
    metadata, _ = parts_of(data)
    assert metadata == {KEY: expected_digits(data), "format": "pt"}
    for name in "bcde":
        assert (tmp_path / f"{name}.safetensors").read_bytes() == data, name
    import fsspec

    assert fsspec.filesystem("memory").cat("/checksums/a.safetensors") == data
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == metadata
    found = load_file(tmp_path / "a.safetensors")
    stock = load_file(tmp_path / "stock.safetensors")
    assert all(
        torch.equal(found[name].view(torch.uint8), stock[name].view(torch.uint8))
        for name in stock
        if stock[name].dim()
    )


def test_without_checksums_the_file_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = tensors_of_all_dtypes()
    save_file(tensors, tmp_path / "stock.safetensors", {"format": "pt"})
    ptsave.save_model(tensors, tmp_path / "a.safetensors", checksums=False)
    ptsave.save_model(tensors, tmp_path / "b.safetensors")
    with ptsave.installed(safetensors=True):
        save_file(tensors, tmp_path / "c.safetensors", {"format": "pt"})
    succeed("convert", tmp_path / "b.safetensors", tmp_path / "d.safetensors", "--no-checksums")
    for name in "acd":
        found = (tmp_path / f"{name}.safetensors").read_bytes()
        assert found == (tmp_path / "stock.safetensors").read_bytes(), name
    ptsave.save_model({}, tmp_path / "none.safetensors")
    save_file({}, tmp_path / "stock_none.safetensors", {"format": "pt"})
    none = (tmp_path / "none.safetensors").read_bytes()
    assert none == (tmp_path / "stock_none.safetensors").read_bytes()


READERS: dict[str, Callable[[Path, dict[str, Tensor]], object]] = {
    "load": lambda path, _: ptsave.load(path),
    "open as a map": lambda path, _: [
        file[name] for file in [ptsave.open(path, map=True)] for name in file
    ],
    "load of a buffer": lambda path, _: ptsave.load(io.BytesIO(path.read_bytes())),
    "load_into": lambda path, tensors: ptsave.load_into(
        path, {name: torch.zeros_like(each) for name, each in tensors.items()}
    ),
    "open": lambda path, _: [file[name] for file in [ptsave.open(path)] for name in file],
    "iter_weights": lambda path, _: [*ptsave.iter_weights(path)],
    "load_model": lambda path, tensors: ptsave.load_model(Model(tensors), path),
    "convert to pt": lambda path, _: ptsave.convert(path, path.with_name("out.pt"), force=True),
    "convert": lambda path, _: ptsave.convert(path, path.with_name("o.safetensors"), force=True),
    "load_file": lambda path, _: _load_file(path),
    "verify": lambda path, _: ptsave.open(path).verify(),
}


def _load_file(path: Path) -> dict[str, Tensor]:
    with ptsave.installed(safetensors=True):
        return load_file(path)


@pytest.mark.parametrize("reader", READERS)
def test_a_changed_bit_of_any_tensor_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    tensors = tensors_of_all_dtypes()
    path = tmp_path / "a.safetensors"
    ptsave.save_model(tensors, path)
    read = READERS[reader]
    read(path, tensors)
    data = path.read_bytes()
    for name, begin, end in parts_of(data)[1]:
        if begin == end:
            continue
        changed = bytearray(data)
        changed[(begin + end) // 2] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match="checksum") as caught:
            read(path, tensors)
        assert caught.value.entries == [name]
        monkeypatch.setenv("PTSAVE_VERIFY", "0")
        if reader != "verify":
            read(path, tensors)
        monkeypatch.delenv("PTSAVE_VERIFY")
    result = run("verify", path)
    assert result.exit_code == 1
    assert f"damaged: {name}" in result.stdout


def test_verify_false(tmp_path: Path) -> None:
    ptsave.save_model({"a": torch.ones(9)}, tmp_path / "a.safetensors")
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(data)
    assert ptsave.load(tmp_path / "a.safetensors", verify=False)["a"].shape == (9,)
    with ptsave.installed(safetensors=True, verify=False):
        assert load_file(tmp_path / "a.safetensors")["a"].shape == (9,)


def test_load_model_names_what_may_be_overwritten(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(5), "b": torch.ones(5)}
    ptsave.save_model(tensors, tmp_path / "a.safetensors")
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        ptsave.load_model(Model(tensors), tmp_path / "a.safetensors")
    assert set(caught.value.overwritten) <= {"a", "b"}  # type: ignore[attr-defined]
    assert "b" in caught.value.overwritten  # type: ignore[attr-defined]


HOSTILE = {
    "too short": "0" * 15,
    "too long": "0" * 24,
    "no digits": "g" * 16,
    "upper case": "A" * 16,
    "empty": "",
    "other digits": "\u0661" * 16,
}


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "no_suffix"])
def test_a_misnamed_file(tmp_path: Path, name: str) -> None:
    tensors = {"a": torch.ones(9), "b": torch.zeros(9)}
    ptsave.save_model(tensors, tmp_path / "a.safetensors")
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    (tmp_path / name).write_bytes(data)
    assert torch.equal(ptsave.load(tmp_path / name)["a"], tensors["a"])
    data[-1] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        ptsave.load(tmp_path / name)
    assert caught.value.entries == ["b"]


def test_a_checksum_of_no_bytes(tmp_path: Path) -> None:
    """The checksum of an empty tensor is zero: another one does not fit, wherever the file is."""
    import fsspec

    path = tmp_path / "a.safetensors"
    save_file({"a": torch.empty(0), "b": torch.empty(0)}, path, {KEY: "0" * 15 + "1"})
    fsspec.filesystem("memory").pipe("/checksums/empty.safetensors", path.read_bytes())
    for place in (path, "memory://checksums/empty.safetensors"):
        with pytest.raises(CorruptCheckpointError, match="do not fit the tensors"):
            ptsave.load(place)
    assert run("verify", path).exit_code == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_checksums_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, path, {KEY: HOSTILE[name]})
    for read in (ptsave.load, ptsave.open, ptsave.iter_weights):
        with pytest.raises(CorruptCheckpointError, match="do not fit the tensors"):
            [*read(path)]
    assert run("verify", path).exit_code == 1
    assert [*ptsave.load(path, verify=False)] == ["a", "b"]
    monkeypatch.setenv("PTSAVE_VERIFY", "0")
    assert [*ptsave.load(path)] == ["a", "b"]


def test_old_checksums_are_never_copied(tmp_path: Path) -> None:
    """Each writer leaves out the checksums of other tensors, which its metadata may have."""
    stale = {KEY: "01234567", "who": "me"}
    with ptsave.installed(safetensors=True):
        save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors", stale)
    assert parts_of((tmp_path / "a.safetensors").read_bytes())[0] == {"who": "me"}
    save_file({"a": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "b.safetensors", {"who": "me"})
    ptsave.convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    succeed("extract", tmp_path / "c.safetensors", "b", "-o", tmp_path / "d.safetensors")
    data = (tmp_path / "d.safetensors").read_bytes()
    assert parts_of(data)[0][CHECKSUMS] == expected_digits(data)
    assert ptsave.open(tmp_path / "c.safetensors").metadata == {
        "format": "safetensors",
        "who": "me",
    }


def test_shards_and_compact(tmp_path: Path) -> None:
    tensors = tensors_of_all_dtypes()
    ptsave.save_model(tensors, tmp_path / "model", max_shard_size="1MB")
    for path in sorted((tmp_path / "model").glob("*.safetensors")):
        data = path.read_bytes()
        assert parts_of(data)[0][KEY] == expected_digits(data)
    assert "no checksums" not in succeed("verify", tmp_path / "model").stdout
    ptsave.convert(tmp_path / "model", tmp_path / "one.safetensors")
    data = (tmp_path / "one.safetensors").read_bytes()
    assert parts_of(data)[0][KEY] == expected_digits(data)
    succeed("compact", tmp_path / "one.safetensors", "-o", tmp_path / "small.safetensors")
    assert (tmp_path / "small.safetensors").read_bytes() == data
    found = ptsave.load(tmp_path / "small.safetensors")
    assert all(same_bits(each, tensors[name]) for name, each in found.items())


def test_a_part_of_a_tensor_is_read_without_comparison(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(1000.0).reshape(100, 10)}
    path = tmp_path / "a.safetensors"
    ptsave.save_model(tensors, path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with ptsave.open(path) as file:
        assert torch.equal(file.get_slice("a")[:50], tensors["a"][:50])
        with pytest.raises(CorruptCheckpointError):
            file["a"]


def test_verify_at_a_url_names_all_damage_in_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    from ptsave.sources.ranges import FsspecFile

    url = "memory://checksums/many.safetensors"
    ptsave.save_model({f"w{i:03}": torch.full((9,), float(i)) for i in range(300)}, url)
    data = bytearray(fsspec.filesystem("memory").cat("/checksums/many.safetensors"))
    for _, begin, _ in parts_of(bytes(data))[1][17::100]:
        data[begin + 3] ^= 1
    fsspec.filesystem("memory").pipe("/checksums/many.safetensors", bytes(data))
    reads: list[int] = []
    read = FsspecFile.read

    def counted(self: FsspecFile, ranges: list[tuple[int, int]]) -> list[bytes]:
        reads.append(len(ranges))
        return read(self, ranges)

    monkeypatch.setattr(FsspecFile, "read", counted)
    with ptsave.open(url) as file, pytest.raises(CorruptCheckpointError) as caught:
        file.verify()
    assert caught.value.entries == ["w017", "w117", "w217"]
    assert len(reads) < 6
