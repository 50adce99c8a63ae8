"""Outlines: what is listed without torch equals what torch's objects give, or is left to torch."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import unpickler_mutation
from _system import run_python
from checkpoint_strategies import CHECKPOINTS
from hypothesis import given
from outlines import assert_equal_or_left_to_torch, by_torch, outlined
from safetensors.torch import save_file
from stock_comparison import saved_bytes, stock_save, zip_records, zipped

import ptsave
from ptsave.inspection.pickle_globals import ORDINARY_GLOBALS, unsafe_globals
from ptsave.inspection.reports import whole_file
from ptsave.inspection.verification import verify_file

INDEX = "model.safetensors.index.json"
CORPUS = unpickler_mutation.corpus()
N_MUTATIONS = 40  # of each object's pickle


# Of the objects of the unpickler's tests.
PLAIN = {"cyclic", "empty", "optimizer", "parameters", "shared", "state dict", "tensor", "tensors"}
PLAIN |= {"views"}


@pytest.mark.parametrize("name", CORPUS)
def test_objects(name: str, tmp_path: Path) -> None:
    has_outline = assert_equal_or_left_to_torch(CORPUS[name], tmp_path)
    assert has_outline or name not in PLAIN


@given(CHECKPOINTS)
def test_any_checkpoint(tmp_path_factory: Any, obj: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = saved_bytes(stock_save, obj)
    assert_equal_or_left_to_torch(data, tmp_path_factory.mktemp("any"))


@pytest.mark.parametrize("name", CORPUS)
def test_mutated_pickles(name: str, tmp_path: Path) -> None:
    """Nothing crashes, and what torch refuses has no outline."""
    records = zip_records(CORPUS[name])
    others = [zip_records(data)["data.pkl"] for data in CORPUS.values()]
    source = random.Random(name)
    for _ in range(N_MUTATIONS):
        data = unpickler_mutation.mutated(records["data.pkl"], others, source)
        assert_equal_or_left_to_torch(zipped(records | {"data.pkl": data}), tmp_path)


STATE = OrderedDict(weight=torch.ones(2, 3), bias=torch.zeros(3))


@pytest.mark.parametrize(
    "records",
    [
        {"version": b"11\n"},
        {"version": b"x"},
        {"version": b"3" * 70_000},
        {"byteorder": b"big"},
        {"constants.pkl": b"N."},
        {"data.pkl": b""},
        {"data.pkl": b"\x80\x02r\xff\xff\xff\xff."},
        {"data.pkl": b"\x80\x02X\xff\xff\xff\x7fabc."},
        {"data.pkl": b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."},
        {"data.pkl": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."},
        {"data.pkl": b"\x80\x02cos\nsystem\n(X\x04\0\0\0truetR."},
        {"data/0": b"short"},
    ],
    ids=str,
)
def test_what_is_not_plain(records: dict[str, bytes], tmp_path: Path) -> None:
    state = zip_records(saved_bytes(stock_save, STATE))
    data = zipped(state | records)
    if outlined(data, tmp_path) is not None:
        assert by_torch(tmp_path)


def test_damage_is_left_to_torch(tmp_path: Path) -> None:
    data = bytearray(saved_bytes(stock_save, STATE))
    at = data.index(b"torch._utils")
    data[at] ^= 1
    assert outlined(bytes(data), tmp_path) is None
    data[at] ^= 1
    assert outlined(bytes(data[:-30]), tmp_path) is None


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "outlined.pt"
    tensors = {str(dtype): torch.zeros(3, 0, 2).to(dtype) for dtype in unpickler_dtypes()}
    tensors |= {
        f"{name} full": torch.ones(2, 3, 4).to(each.dtype) for name, each in tensors.items()
    }
    tensors |= {"scalar": torch.tensor(1.5), "one": torch.ones(1, 1, 5)}
    save_file(tensors, path, metadata={"format": "pt", "key": "value"})
    assert assert_equal_or_left_to_torch(path.read_bytes(), tmp_path)
    assert not assert_equal_or_left_to_torch(path.read_bytes()[:-1], tmp_path)


def unpickler_dtypes() -> list[torch.dtype]:
    return [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
        torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip


@pytest.mark.parametrize("state", [STATE, {}, [1, "two"], {"a": {"b": [torch.ones(3)]}}], ids=str)
def test_whole_files(state: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    torch.save(state, path)
    found: list[int] = []
    expected: list[int] = []
    assert whole_file(path, found.append) == verify_file(path, expected.append)
    assert found == expected
    content = Path(path).read_bytes()
    damaged = content.replace(torch.ones(3).numpy().tobytes(), b"damage" + bytes(6), 1)
    if damaged != content:
        Path(path).write_bytes(damaged)
        assert whole_file(path, None) is None
        assert verify_file(path).problems


def test_ordinary_globals_are_allowed() -> None:
    assert unsafe_globals(ORDINARY_GLOBALS) == []


def test_whole_safetensors_files(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    for tensors in ({}, {"a": torch.ones(3), "b": torch.ones(2, 0)}):
        save_file(tensors, path)
        assert whole_file(path, None) == verify_file(path)
    Path(path).write_bytes(Path(path).read_bytes()[:-1])
    assert whole_file(path, None) is None


def test_the_commands_import_no_torch(tmp_path: Path) -> None:
    torch.save({"model": STATE, "epoch": 3}, tmp_path / "a.pt")
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
    ptsave.save_model(model, tmp_path / "shards", max_shard_size="2KB")
    ptsave.convert(tmp_path / "shards", tmp_path / "pt", format="pt", max_shard_size="2KB")
    code = "import sys\nfrom ptsave.__main__ import main\ntry:\n    main()\nfinally:\n"
    code += "    sys.stderr.write(str('torch' in sys.modules))"
    shards = tmp_path / "shards"
    paths = (tmp_path / "a.pt", next(shards.glob("*.safetensors")), shards, tmp_path / "pt")
    for path, word in product((*paths, shards / INDEX), ("ls", "verify", "globals")):
        option = "--json" if path.is_file() else "--quiet"
        result = run_python(code, word, option, path)
        assert (result.stderr[-5:], bool(result.stdout)) == ("False", True), (word, path)
