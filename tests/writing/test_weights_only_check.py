"""`weights_only_check=True`: a warning at save time of what ``weights_only=True`` will refuse."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import io
import pickle
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stock_comparison import stock_load
from torch import nn
from torch.serialization import safe_globals

import ptsave
from ptsave.archive.unpickling import refusal_of
from ptsave.writing.planning import pickle_object


class Color(enum.Enum):
    RED = 1


class Point(collections.namedtuple("Point", "x y")):
    pass


class Traced(torch.Tensor):
    pass


def to_path(write: Callable[..., object]) -> Callable[..., Path]:
    def save(folder: Path, obj: dict[str, Any], **options: Any) -> Path:
        write(obj, folder / "c.pt", **options)
        return folder / "c.pt"

    return save


save = to_path(ptsave.save)


def checkpointer_save(folder: Path, obj: dict[str, Any], **options: Any) -> Path:
    with ptsave.AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(1, **obj, **options)
    return checkpointer.path(1)


def checkpointer_made(folder: Path, obj: dict[str, Any], **options: Any) -> Path:
    with ptsave.AsyncCheckpointer(folder, **options) as checkpointer:
        checkpointer.save(1, **obj)
    return checkpointer.path(1)


def installed(folder: Path, obj: dict[str, Any], **options: Any) -> Path:
    with ptsave.installed(**options):
        torch.save(obj, folder / "c.pt")
    return folder / "c.pt"


def by_torchs_name(folder: Path, obj: dict[str, Any], **options: Any) -> Path:
    with ptsave.installed():
        torch.save(obj, folder / "c.pt", **options)
    return folder / "c.pt"


SAVERS = [
    to_path(lambda obj, path, **options: ptsave.async_save(obj, path, **options).result()),
    to_path(lambda obj, path, **options: ptsave.save_checkpoint(path, **obj, **options)),
    to_path(partial(ptsave.save, _use_new_zipfile_serialization=False)),
]
SAVERS += [save, checkpointer_save, checkpointer_made, installed, by_torchs_name]
Saver = Callable[..., Path]


def words_of(saver: Saver, folder: Path, obj: dict[str, Any], **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = saver(folder, obj, **options)
    assert path.exists()
    found = [each for each in caught if each.category is ptsave.CheckpointWarning]
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


def checkpoint() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


@pytest.mark.parametrize("saver", SAVERS)
def test_it_names_places_and_types(tmp_path: Path, saver: Saver) -> None:
    obj = {**checkpoint(), "config": {"lr": np.float64(1), "args": [argparse.Namespace(a=1)]}}
    (words,) = words_of(saver, tmp_path, obj, weights_only_check=True)
    assert "'config.lr' (numpy.float64), 'config.args.0' (argparse.Namespace)" in words
    assert "load_into() accept 'config.lr' (numpy.float64)." in words
    with pytest.raises(pickle.UnpicklingError):
        stock_load(tmp_path / "c.pt" if (tmp_path / "c.pt").exists() else next(tmp_path.iterdir()))


@pytest.mark.parametrize("saver", SAVERS)
def test_it_says_nothing_of_what_will_load(tmp_path: Path, saver: Saver) -> None:
    assert words_of(saver, tmp_path, checkpoint(), weights_only_check=True) == []
    obj = {"lr": np.float64(1)}
    for options in ({}, {"weights_only_check": False}):
        assert words_of(saver, tmp_path, obj, **options) == []


def test_a_checkpointers_option_is_the_default(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, weights_only_check=True)
    with pytest.warns(ptsave.CheckpointWarning, match="'x' "):
        checkpointer.save(1, x=np.float64(1)).result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointer.save(2, x=np.float64(1), weights_only_check=False).result()
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


VALUES: dict[str, Any] = {
    "none": None,
    "text": "x",
    "number": 1,
    "large": 1 << 3000,
    "real": 0.5,
    "complex": 1j,
    "bytes": b"x",
    "no bytes": b"",
    "bytearray": bytearray(b"x"),
    "set": {1},
    "tuple": (1,),
    "frozenset": frozenset([1]),
    "size": torch.Size([1]),
    "dtype": torch.int8,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "path": Path("x"),
    "counter": collections.Counter("a"),
    "ordered": collections.OrderedDict(a=1),
    "default": collections.defaultdict(list),
    "deque": collections.deque([1]),
    "namedtuple": Point(1, 2),
    "enum": Color.RED,
    "fraction": Fraction(1, 2),
    "date": datetime.date(2026, 1, 1),
    "array": np.zeros(2),
    "numpy dtype": np.dtype("f8"),
    "function": argparse.Namespace,
    "type": int,
    "module": nn.Linear(1, 1),
    "tensor": torch.ones(1),
    "parameter": nn.Parameter(torch.ones(1)),
    "subclass": Traced([1.0]),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "conjugate": torch.ones(2, dtype=torch.cfloat).conj(),
    "storage": torch.ones(2).untyped_storage(),
    "empty": torch.ones(0),
    "generator": torch.Generator().get_state(),
    "slice": slice(1),
}


# With warnings of torch's own.
LATE: dict[str, Callable[[], Any]] = {
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "typed": lambda: torch.ones(2).storage(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*VALUES, *LATE])
def test_it_warns_of_exactly_what_torch_refuses(tmp_path: Path, name: str) -> None:
    value = LATE[name]() if name in LATE else VALUES[name]
    obj = {"a": {"b": [value]}}
    words = words_of(save, tmp_path, obj, weights_only_check=True)
    try:
        stock_load(tmp_path / "c.pt", weights_only=True)
    except pickle.UnpicklingError:
        kind = type(value)
        assert len(words) == 1
        assert f"because of 'a.b.0' ({kind.__module__}.{kind.__qualname__})" in words[0]
    else:
        assert words == []


@pytest.mark.parametrize("name", ["path", "array", "deque", "enum", "no bytes", "function"])
def test_what_restores_accept_is_said(tmp_path: Path, name: str) -> None:
    (words,) = words_of(save, tmp_path, {"x": VALUES[name]}, weights_only_check=True)
    try:
        ptsave.load_checkpoint(tmp_path / "c.pt")
    except pickle.UnpicklingError:
        assert "accept" not in words
    else:
        assert "accept these" in words


def test_what_the_user_allows(tmp_path: Path) -> None:
    obj = {"args": argparse.Namespace(a=1)}
    with safe_globals([argparse.Namespace]):
        assert words_of(save, tmp_path, obj, weights_only_check=True) == []
    assert words_of(save, tmp_path, obj, weights_only_check=True) != []


def test_places_that_are_no_entries(tmp_path: Path) -> None:
    (words,) = words_of(save, tmp_path, {Color.RED: 1}, weights_only_check=True)  # type: ignore[dict-item]
    assert "a key or an attribute" in words
    assert "Color" in words
    ordered: Any = collections.OrderedDict(a=1)
    ordered.color = Color.RED
    (words,) = words_of(save, tmp_path, {"x": ordered}, weights_only_check=True)
    assert "a key or an attribute" in words
    (words,) = words_of(save, tmp_path, Color.RED, weights_only_check=True)  # type: ignore[arg-type]
    assert "the object itself" in words


def test_many_are_not_all_named(tmp_path: Path) -> None:
    obj = {"history": [np.float64(i) for i in range(1000)]}
    (words,) = words_of(save, tmp_path, obj, weights_only_check=True)
    assert "'history.7' (numpy.float64) and more" in words
    assert "history.8" not in words
    (words,) = words_of(save, tmp_path, {"x": obj["history"][:8]}, weights_only_check=True)
    assert "and more" not in words


def test_a_refused_container_is_named_once(tmp_path: Path) -> None:
    obj = {"stats": collections.defaultdict(list, {"a": [np.float64(1)], "b": Color.RED}), "c": 1}
    (words,) = words_of(save, tmp_path, obj, weights_only_check=True)
    assert words.count("'stats") == 1


def test_the_file_is_the_same(tmp_path: Path) -> None:
    obj = {**checkpoint(), "lr": np.float64(1), "args": argparse.Namespace(a=1)}
    expected = save(tmp_path, obj).read_bytes()
    with pytest.warns(ptsave.CheckpointWarning):
        assert save(tmp_path, obj, weights_only_check=True).read_bytes() == expected


def test_to_a_stream_and_a_url() -> None:
    for target in (io.BytesIO(), "memory://checked/c.pt"):
        with pytest.warns(ptsave.CheckpointWarning, match=r"'lr' \(numpy.float64\)"):
            ptsave.save({"lr": np.float64(1)}, target, weights_only_check=True)


def test_it_leaves_nothing_behind() -> None:
    """Sparse tensors without values are not those that the next load validates."""
    data, _ = pickle_object({"x": torch.eye(2).to_sparse()}, pickle, 2)
    assert refusal_of(data) is None
    stream = io.BytesIO()
    torch.save({"x": torch.eye(2).to_sparse()}, stream)
    stream.seek(0)
    assert torch.equal(stock_load(stream)["x"].to_dense(), torch.eye(2))


@pytest.mark.parametrize("value", [1, "yes", nn.Linear(1, 1), {"loss": 1}], ids=repr)
def test_an_object_of_that_name_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="'weights_only_check' is an option of"):
        ptsave.save_checkpoint(tmp_path / "c.pt", weights_only_check=value)
    with pytest.raises(TypeError, match="'weights_only_check' is an option of"):
        checkpointer_save(tmp_path, {}, weights_only_check=value)
    refusing: list[Callable[..., Any]] = [
        partial(ptsave.load_checkpoint, tmp_path / "c.pt"),
        ptsave.AsyncCheckpointer(tmp_path).restore,
    ]
    for restore in refusing:
        with pytest.raises(TypeError, match="weights_only_check=True is an option of"):
            restore(weights_only_check=True)
    assert list(tmp_path.iterdir()) == []
