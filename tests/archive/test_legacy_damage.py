"""Damaged files of torch before 1.6: torch's error, which also names the file."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_comparison import assert_same_failure, failure_of, saved_bytes, stock_load, stock_save

import ptsave

OBJECT = {"weight": torch.arange(20.0), "bias": torch.ones(3, 4), "epoch": 7}
DATA = saved_bytes(stock_save, OBJECT, _use_new_zipfile_serialization=False)
MAGIC_NBYTES = 15
# Types of the errors that torch's unpickler raises without having meant to.
STUMBLES = (
    *(AssertionError, AttributeError, EOFError, LookupError, OverflowError, TypeError),
    *(ValueError, struct.error),
)


def changed() -> list[bytes]:
    """Files with a byte or two changed behind the magic number, which do not load."""
    rng = random.Random(5)
    found = []
    for _ in range(200):
        data = bytearray(DATA)
        for _ in range(rng.choice([1, 2])):
            data[rng.randrange(MAGIC_NBYTES, len(data) - 200)] = rng.randrange(256)
        try:
            stock_load(io.BytesIO(bytes(data)))
        except Exception:
            found.append(bytes(data))
    return found


def check(load: Callable[[Any], object], data: bytes, path: Path) -> BaseException:
    path.write_bytes(data)
    expected = failure_of(lambda: stock_load(io.BytesIO(data)))
    error = assert_same_failure(lambda: load(path), lambda: stock_load(io.BytesIO(data)))
    if isinstance(expected, STUMBLES) or "corrupt" in str(expected):
        assert isinstance(error, ptsave.CorruptCheckpointError), (expected, error)
        assert error.path == str(path)
        assert str(path) in str(error)
    assert_same_failure(lambda: ptsave.load(io.BytesIO(data)), lambda: stock_load(io.BytesIO(data)))
    return error


def test_cut_short(path: Path) -> None:
    for n_left in range(MAGIC_NBYTES, len(DATA) - 1, 23):
        check(ptsave.load, DATA[:n_left], path)


def test_changed_bytes(tmp_path: Path) -> None:
    kinds = {type(check(ptsave.load, data, tmp_path / "model.pt")) for data in changed()}
    assert len(kinds) > 4


@pytest.mark.parametrize(
    "load", [lambda f: ptsave.load_into(f, dict(OBJECT)), ptsave.load_checkpoint]
)
def test_restores(tmp_path: Path, load: Callable[[Any], object]) -> None:
    check(load, DATA[:100], tmp_path / "model.pt")


def test_something_in_front_of_an_archive(tmp_path: Path) -> None:
    """torch says "KeyError: 1349217909"."""
    check(ptsave.load, b"junk" + saved_bytes(stock_save, OBJECT), tmp_path / "model.pt")


def test_errors_of_a_map_location_stay(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(DATA)

    def refuse(storage: object, location: str) -> None:
        raise KeyError(location)

    with pytest.raises(KeyError) as caught:
        ptsave.load(path, map_location=refuse)
    assert type(caught.value) is KeyError
