"""The engine's pickler writes Python's bytes."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _pickling import PICKLED, QUIET, assert_pickled, cycles, fresh, stock_pickle
from stock_comparison import assert_same_bytes, assert_same_failure, stock_save, typed_storage

import ptsave
from ptsave import _C

pytestmark = QUIET


@pytest.mark.parametrize("name", PICKLED)
def test_pickled(name: str, tmp_path: Path) -> None:
    assert_pickled(PICKLED[name](), tmp_path)


@pytest.mark.parametrize("size", [1, 2, 999, 1000, 1001, 1002, 2000, 2001, 3001])
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "ordered dict", "set", "attributes"])
def test_batches(kind: str, size: int, tmp_path: Path) -> None:
    numbers = range(10**6, 10**6 + size)
    if kind == "attributes":
        obj: Any = OrderedDict()
        vars(obj).update({f"attribute {i}": i for i in numbers})
    else:
        kinds: dict[str, Callable[[Any], Any]] = {
            "list": list,
            "tuple": tuple,
            "dict": lambda keys: {key: str(key) for key in keys},
            "ordered dict": lambda keys: OrderedDict((key, str(key)) for key in keys),
            "set": set,
        }
        obj = kinds[kind](numbers)
    assert_pickled([obj, obj], tmp_path)


def test_meta_storages() -> None:
    """Their pickle can be made, but their bytes cannot be saved."""
    storage = torch.UntypedStorage(3, device="meta")
    obj = ["meta", storage, typed_storage(torch.ones(2, device="meta")), storage, fresh("meta")]
    pickled = _C.pickle_object(obj)
    with torch.serialization.skip_data():
        assert pickled is not None
        assert pickled[0] == stock_pickle(obj)
    assert not pickled[1].in_reach
    assert_same_failure(
        lambda: ptsave.save(obj, io.BytesIO()), lambda: stock_save(obj, io.BytesIO())
    )


@pytest.mark.parametrize("number", range(12))
def test_cycles(number: int) -> None:
    obj = list(cycles())[number]
    pickled = _C.pickle_object(obj)
    assert pickled is not None
    assert pickled[0] == stock_pickle(obj)


def test_nothing_of_the_engine_is_used_for_other_pickles(tmp_path: Path) -> None:
    class Module:
        Pickler = pickle.Pickler

    obj = {"tensor": torch.ones(3), "bytes": b"abc"}
    for options in ({"pickle_protocol": 4}, {"pickle_module": Module}):
        assert_same_bytes(obj, tmp_path, **options)


def test_replaced_pickler_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by packages that put a pickler of their own in place of Python's."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return (int, ("7",)) if obj == OrderedDict(a=1) else NotImplemented

    monkeypatch.setattr(pickle, "Pickler", Pickler)
    stream = io.BytesIO()
    ptsave.save([OrderedDict(a=1), {2}], stream)
    assert torch.load(io.BytesIO(stream.getvalue()), weights_only=False) == [7, {2}]
