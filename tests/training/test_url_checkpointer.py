"""AsyncCheckpointer in every kind of place; on URLs pruning, failures and forks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import in_child
from stock_comparison import assert_same_object, stock_load, stock_save
from test_checkpointer import name_of, states, training
from torch import nn
from url_file_systems import MEMORY, PLAIN, contents, failing

import ptsave

PLACES = ["memory://run", "plain://a/run/", "memory://", "directory"]


pytestmark = pytest.mark.usefixtures("_clean_file_systems")


def names_in(protocol: str) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in contents(protocol))


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param if "://" in request.param else tmp_path / "run"


def files_in(place: str | Path) -> dict[str, bytes]:
    if isinstance(place, Path):
        return {path.name: path.read_bytes() for path in place.iterdir()}
    found = contents(place.partition(":")[0])
    return {path.rpartition("/")[2]: data for path, data in found.items()}


def test_steps(tmp_path: Path, place: Any) -> None:
    """Files are those of `save_checkpoint` and of torch."""
    objects = training()
    checkpointer = ptsave.AsyncCheckpointer(place, keep=2)
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    with checkpointer:
        for step in (1, 5, 20, 100):
            checkpointer.save(step, **objects, step=step)
    assert checkpointer.steps() == [20, 100]
    found = files_in(place)
    assert sorted(found) == [name_of(20), name_of(100)]
    path = checkpointer.latest()
    base = place if isinstance(place, Path) or place.endswith("/") else f"{place}/"
    assert path == checkpointer.path(100)
    assert path == (base / name_of(100) if isinstance(base, Path) else f"{base}{name_of(100)}")
    stock_save({**states(objects), "step": 100}, tmp_path / name_of(100))
    assert found[name_of(100)] == (tmp_path / name_of(100)).read_bytes()
    ptsave.save_checkpoint(tmp_path / name_of(100), **objects, step=100)
    assert found[name_of(100)] == (tmp_path / name_of(100)).read_bytes()
    again = ptsave.AsyncCheckpointer(place)
    assert again.steps() == [20, 100]
    assert again.latest() == checkpointer.latest()


def test_restore(place: Any) -> None:
    model = nn.Linear(2, 2)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ptsave.AsyncCheckpointer(place) as checkpointer:
        checkpointer.save(1, model=model, note="one")
        with torch.no_grad():
            model.weight.zero_()
        checkpointer.save(2, model=model, note="two")
    weight, memory = model.weight, model.weight.data_ptr()
    assert checkpointer.restore(1, model=model) == {"note": "one"}
    assert_same_object(dict(model.state_dict()), expected)
    assert model.weight is weight
    assert model.weight.data_ptr() == memory
    assert checkpointer.restore(model=model) == {"note": "two"}
    assert not model.weight.any()
    rest = checkpointer.restore(1)
    assert rest.pop("note") == "one"
    assert_same_object(dict(rest["model"]), expected)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7, only of 1, 2") as caught:
        checkpointer.restore(7, model=model)
    assert caught.value.filename == str(place)


def test_other_files_are_left_alone() -> None:
    others = [
        "step-1.txt",
        "model.pt",
        "xstep-00000001.pt",
        ".step-00000001.pt.0123456789abcdef.ptsave",
    ]
    for name in others:
        ptsave.save([1], f"plain://run/{name}")
    ptsave.save([1], "plain://run/step-00000001.pt/model.pt")  # below a directory of that name
    with ptsave.AsyncCheckpointer("plain://run", keep=1) as checkpointer:
        for step in (2, 3):
            checkpointer.save(step, value=step)
    assert checkpointer.steps() == [3]
    assert names_in(PLAIN) == sorted([*others, "model.pt", name_of(3)])


@pytest.mark.parametrize("method", ["open", "write", "mv", "ls"])
def test_failed_saves_that_only_warn(method: str) -> None:
    checkpointer = ptsave.AsyncCheckpointer("plain://run", keep=1)
    checkpointer.save(1, value=1).result()
    checkpointer.wait()
    with failing(method, ConnectionError("gone")), pytest.warns(ptsave.CheckpointWarning) as caught:
        assert isinstance(checkpointer.save(2, value=2, on_error="warn").exception(), OSError)
    assert ["plain://run: step 2 was not saved" in str(each.message) for each in caught] == [True]
    checkpointer.close()
    assert checkpointer.steps() == [1]


@pytest.mark.parametrize("method", ["open", "write", "mv", "ls"])
def test_failed_saves(method: str) -> None:
    checkpointer = ptsave.AsyncCheckpointer("plain://run", keep=1)
    checkpointer.save(1, value=1).result()
    checkpointer.wait()
    old = contents(PLAIN)
    error = OSError(errno.ENOSPC, "no room")
    with failing(method, error):
        future = checkpointer.save(2, value=torch.ones(100_000))
        with pytest.raises(ptsave.SaveError, match="no room") as caught:
            future.result()
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).startswith("plain://run")
    assert contents(PLAIN) == old
    checkpointer.save(3, value=1)
    checkpointer.close()
    assert checkpointer.steps() == [3]


def test_files_that_cannot_be_removed() -> None:
    checkpointer = ptsave.AsyncCheckpointer("plain://run", keep=1)
    checkpointer.save(1, value=1).result()

    def save_another() -> None:
        checkpointer.save(2, value=1)
        checkpointer.wait()

    warns = pytest.warns(ptsave.CheckpointWarning, match="cannot be removed, so it stays")
    with failing("rm_file", PermissionError("no")), warns:
        save_another()
    assert checkpointer.steps() == [1, 2]


def test_local_urls(tmp_path: Path) -> None:
    with ptsave.AsyncCheckpointer(f"file://{tmp_path}/run", keep=1) as checkpointer:
        checkpointer.save(1, value=1)
        checkpointer.save(2, value=2)
    assert checkpointer.latest() == tmp_path / "run" / name_of(2)
    assert stock_load(checkpointer.path(2)) == {"value": 2}


def test_options() -> None:
    with pytest.raises(TypeError, match="storage_options are only for URLs"):
        ptsave.AsyncCheckpointer("run", storage_options={"a": 1})
    checkpointer = ptsave.AsyncCheckpointer("memory://run", storage_options={})
    options: dict[str, Any] = {"storage_options": {"a": 1}}
    with pytest.raises(TypeError, match="is an option of"):
        checkpointer.save(1, **options)
    named: dict[str, Any] = {"storage_options": nn.Linear(1, 1)}
    with pytest.raises(TypeError, match=r"'storage_options' is an option of .*under another name"):
        ptsave.save_checkpoint("memory://model.pt", model=nn.Linear(1, 1), **named)
    assert contents(MEMORY) == {}
    with pytest.raises(ptsave.SaveError, match="lacks a bucket name"):
        ptsave.AsyncCheckpointer("s3://")


def test_a_fork() -> None:
    checkpointer = ptsave.AsyncCheckpointer("memory://run")
    checkpointer.save(1, value=1).result()

    def in_the_child() -> None:
        assert checkpointer.steps() == [1]
        checkpointer.save(2, value=2).result()
        assert contents(MEMORY).keys() == {f"/run/{name_of(step)}" for step in (1, 2)}

    in_child(in_the_child)
    assert checkpointer.steps() == [1]
