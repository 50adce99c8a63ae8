"""Records such as the version are bounded before they are read; what messages quote is short."""

from __future__ import annotations

import io
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from command_line import run, succeed
from stock_comparison import (
    assert_same_object,
    deflated,
    saved_bytes,
    stock_load,
    stock_save,
    zip_records,
    zipped,
)

import ptsave
from ptsave.inspection.verification import verify_file

_NAMES = ["byteorder", "version", ".format_version", ".storage_alignment"]
_NAMES += [".data/version", ".data/serialization_id"]
_NBYTES = 20 << 20


def _with(name: str, content: bytes, method: int) -> bytes:
    records = zip_records(saved_bytes(stock_save, {"w": torch.arange(4.0)}))
    return zipped({**records, name: content}, method)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_huge_small_records(tmp_path: Path, name: str, method: int) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(_with(name, b"\x00" * _NBYTES, method))
    words = f"record {name}: the record has {_NBYTES} bytes, more than the 65536 "
    tracemalloc.start()
    with pytest.raises(ptsave.CorruptCheckpointError, match=words) as caught:
        ptsave.load(path)
    with pytest.raises(ptsave.CorruptCheckpointError, match=words):
        ptsave.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < _NBYTES // 2
    assert caught.value.record == name
    assert len(str(caught.value)) < 1000
    assert [found.record for found in verify_file(path).problems] == [name]
    for command in (
        ("ls", path),
        ("extract", path, "w", "-o", tmp_path / "b.pt"),
        ("convert", path, tmp_path / "b.safetensors"),
        ("compact", path, "-o", tmp_path / "c.pt"),
        ("diff", path, path),
    ):
        begin = time.perf_counter()
        result = run(*command)
        assert (result.exit_code, len(result.output) < 1500) == (2, True), command
        assert time.perf_counter() - begin < 5


def test_a_version_of_thousands_of_digits() -> None:
    data = _with("version", b"9" * 5000, zipfile.ZIP_STORED)
    with pytest.raises(
        ptsave.CorruptCheckpointError, match="Couldn't parse the version 999"
    ) as error:
        ptsave.load(io.BytesIO(data))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", ["data.pkl", "data/0"])
def test_compressed_archives_still_load(name: str) -> None:
    """Zeros deflate by a factor of nearly 1032, which is what DEFLATE can do."""
    obj = {"zeros": torch.zeros(1 << 20), "text": "x" * (1 << 20)}
    data = deflated(saved_bytes(stock_save, obj))
    assert_same_object(ptsave.load(io.BytesIO(data)), stock_load(io.BytesIO(data)))


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("location", [None, "meta"])
def test_storage_key_with_a_lone_surrogate(
    tmp_path: Path, weights_only: bool, location: str | None
) -> None:
    records = zip_records(saved_bytes(stock_save, {"w": torch.arange(4.0)}))
    key, other = b"X\x01\x00\x00\x000", b"X\x03\x00\x00\x00\xed\xa0\x80"
    assert records["data.pkl"].count(key) == 1
    pickled = records["data.pkl"].replace(key, other)
    for kept in (records, {k: v for k, v in records.items() if k != ".format_version"}):
        path = tmp_path / "a.pt"
        path.write_bytes(zipped({**kept, "data.pkl": pickled}))
        if location == "meta" and ".format_version" in kept:
            continue  # torch asserts that the first key is "0"
        with pytest.raises(ptsave.CorruptCheckpointError, match=r"data/\\ud800: file not found"):
            ptsave.load(path, weights_only=weights_only, map_location=location)
    with pytest.raises(ptsave.CorruptCheckpointError, match=r"data/\\ud800: file not found"):
        ptsave.open(path)
    assert verify_file(path).problems


def test_output_of_the_commands_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"\x1b[31mred": {1, 2}, "w": torch.ones(1)}, path)
    target = tmp_path / "b\x1b[0m.safetensors"
    output = succeed("convert", path, target, "--drop").output
    assert "left out: \\x1b[31mred" in output
    assert "\x1b" not in output
