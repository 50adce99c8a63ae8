"""Options beside objects that are given by name: as those of `save`, or refused."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_comparison import assert_same_object, stock_load, stock_save
from test_names import LOADERS, Loader
from torch import nn

import ptsave
from ptsave.training.options import _all_options

OPTIONS = ["fsync", "atomic", "progress", "weights_only_check"]
DEFAULT_TO_THE_CHECKPOINTERS = ("fsync", "weights_only_check")
# Of other functions, which were entries of the file.
OTHERS: dict[str, list[Any]] = {
    "pickle_module": [pickle],
    "pickle_protocol": [4],
    "_use_new_zipfile_serialization": [False],
    "_disable_byteorder_record": [True],
    "staging": ["background"],
    "max_staged_bytes": [1 << 30, None],
    "when_full": ["raise"],
    "mmap": [True, None],
    "strict": [False],
    "map_location": ["cpu", torch.device("cpu")],
    "weights_only": [True, None],
    "verify": [False],
    "fallback": [True],
    "assign": [True],
    "ignore_mismatched_sizes": [True],
    "match": ["name"],
    "key_mapping": [lambda name: name],
    "named_parameters": [nn.Linear(1, 1).named_parameters()],
}
OTHER_VALUES = [(name, value) for name, values in OTHERS.items() for value in values]


def save_checkpoint(folder: Path, **objects: Any) -> Path:
    ptsave.save_checkpoint(folder / "c.pt", **objects)
    return folder / "c.pt"


def save_step(folder: Path, **objects: Any) -> Path:
    with ptsave.AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(1, **objects)
    return checkpointer.path(1)


SAVERS = [save_checkpoint, save_step]
Saver = Callable[..., Path]


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_no_entries(tmp_path: Path, save: Saver, name: str) -> None:
    """An object that is called as one is refused."""
    values: list[Any] = [{"loss": 0.5}, nn.Linear(1, 1), torch.ones(1), 0.5, 1, 0, "x", []]
    if save is save_checkpoint or name not in DEFAULT_TO_THE_CHECKPOINTERS:
        values.append(None)  # otherwise: as the checkpointer
    for refused in values:
        with pytest.raises(TypeError, match=f"'{name}' is an option of .*under another name"):
            save(tmp_path, model=nn.Linear(2, 2), **{name: refused})
    assert os.listdir(tmp_path) == []
    for value in (False, True):
        model = nn.Linear(2, 2)
        path = save(tmp_path, model=model, **{name: value})
        assert list(stock_load(path)) == ["model"]
        found = path.read_bytes()
        stock_save({"model": model.state_dict()}, path)
        assert found == path.read_bytes()


@pytest.mark.parametrize("save", SAVERS)
def test_options_of_others_are_no_entries(tmp_path: Path, save: Saver) -> None:
    """Their values are refused; objects of these names are saved."""
    for name, value in OTHER_VALUES:
        with pytest.raises(TypeError, match=OF_ANOTHER.format(name)):
            save(tmp_path, model=nn.Linear(2, 2), **{name: value})
        assert os.listdir(tmp_path) == []
    for name in OTHERS:
        saved: Any = {name: {"loss": torch.ones(2)}, "model": nn.Linear(2, 2).state_dict()}
        assert_same_object(stock_load(save(tmp_path, **saved)), saved)


def test_an_option_of_the_checkpointer_alone(tmp_path: Path) -> None:
    calls: list[Callable[..., Any]] = [partial(save_checkpoint, tmp_path), *restores_of(tmp_path)]
    for call in calls:
        with pytest.raises(TypeError, match=OF_ANOTHER.format("on_error")):
            call(on_error="warn")


OF_ANOTHER = r"{}=.* is an option of \S+, which \S+ does not have"
OWN_OF_LOADING = {"strict", "map_location", "weights_only", "verify", "assign"}
OWN_OF_LOADING |= {"ignore_mismatched_sizes", "match", "key_mapping"}


def restores_of(folder: Path) -> list[Callable[..., Any]]:
    path = folder / "step-00000001.pt"
    return [partial(ptsave.load_checkpoint, path), ptsave.AsyncCheckpointer(folder).restore]


def test_every_option_of_load_is_refused_as_an_object() -> None:
    known = {name for _, name, _ in _all_options()} | {"device"}  # map_location's other name
    assert {*inspect.signature(ptsave.load).parameters} - known == {"f", "pickle_load_args"}


def test_loading_takes_no_options_of_others(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    others = [pair for pair in OTHER_VALUES if pair[0] not in OWN_OF_LOADING]
    of_saving = [("fsync", True), ("atomic", False), ("weights_only_check", True)]
    for name, value in (*of_saving, *others):
        stock_save({"model": nn.Linear(2, 2).state_dict(), name: 1}, tmp_path / "step-00000001.pt")
        of_one = (name, value) in [*of_saving, ("fallback", True)]  # only load_checkpoint refuses
        for restore in restores_of(tmp_path)[: 1 if of_one else 2]:
            with pytest.raises(TypeError, match=OF_ANOTHER.format(name)):
                restore(model=model, **{name: value})
    assert_same_object(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    "name",
    ["strict", "verify", "progress", "weights_only", "map_location", "match", "key_mapping"],
)
def test_targets_called_as_an_option_of_load_checkpoint(tmp_path: Path, name: str) -> None:
    stock_save({"model": nn.Linear(2, 2).state_dict(), name: {}}, tmp_path / "c.pt")
    values: tuple[Any, ...] = (nn.Linear(1, 1), [], 0.5)
    for value in values:
        with pytest.raises(TypeError, match=f"'{name}' is an option of .*returns the entry"):
            ptsave.load_checkpoint(tmp_path / "c.pt", model=nn.Linear(2, 2), **{name: value})
    if name in ("map_location", "match", "key_mapping"):
        return
    stock_save({name: {"loss": torch.ones(2)}}, tmp_path / "c.pt")
    targets: dict[str, Any] = {name: {"loss": torch.zeros(2)}}  # is not left empty
    with pytest.raises(TypeError, match=f"'{name}' is an option"):
        ptsave.load_checkpoint(tmp_path / "c.pt", **targets)


def test_files_with_such_an_entry_load(tmp_path: Path) -> None:
    saved = nn.Linear(2, 2).state_dict()
    for name in (*OPTIONS, *OTHERS):
        for value in (True, {"loss": 0.5}):
            stock_save({"model": saved, name: value}, tmp_path / "step-00000001.pt")
            for restore in restores_of(tmp_path):
                model = nn.Linear(2, 2)
                assert restore(model=model) == {name: value}
                assert_same_object(dict(model.state_dict()), dict(saved))


@pytest.mark.parametrize("name", ["fsync", "atomic", "mmap"])
def test_files_with_such_an_entry_restore_into_targets(tmp_path: Path, name: str) -> None:
    stock_save({name: {"loss": torch.ones(2)}}, tmp_path / "c.pt")
    target: Any = {"loss": torch.zeros(2)}
    assert ptsave.load_checkpoint(tmp_path / "c.pt", **{name: target}) == {}
    assert torch.equal(target["loss"], torch.ones(2))


# ------------------------------------------------------------------------------- what they do


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("atomic", [False, True])
def test_atomic(tmp_path: Path, save: Saver, atomic: bool) -> None:
    """Whether another file gets the name, or the same file other contents."""
    path = save(tmp_path, value=torch.zeros(2))
    with path.open("rb") as old:
        save(tmp_path, value=torch.ones(2), atomic=atomic)
        assert torch.equal(stock_load(path)["value"], torch.ones(2))
        found = stock_load(old)["value"]
    assert torch.equal(found, torch.zeros(2) if atomic else torch.ones(2))


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("progress", [False, True])
def test_progress(
    tmp_path: Path, save: Saver, progress: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, value=torch.ones(1 << 20), progress=progress)
    shown = capfd.readouterr().err
    assert ("saving" in shown and "100%" in shown) == progress
    ptsave.load_checkpoint(path, progress=progress)
    assert ("restoring" in capfd.readouterr().err) == progress


COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
static int files, directories;
static void count(int fd) {
  struct stat status;
  if (fstat(fd, &status) == 0) *(S_ISDIR(status.st_mode) ? &directories : &files) += 1;
}
int fsync(int fd) { count(fd); return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { count(fd); return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
int synced_files(void) { int n = files; files = 0; return n; }
int synced_directories(void) { int n = directories; directories = 0; return n; }
"""
SYNCING = """
import ctypes, json, os, sys, torch, ptsave
counter = ctypes.CDLL(sys.argv[1])
def count(save):
    counter.synced_files(), counter.synced_directories()
    save()
    return counter.synced_files(), counter.synced_directories()
value = torch.ones(4)
found = {}
for large in (False, True):
    value = torch.ones(6 << 20) if large else torch.ones(4)
    for fsync in (False, True):
        for atomic in (False, True):
            options = {"fsync": fsync, "atomic": atomic}
            key = f"{large} {fsync} {atomic} "
            found[key + "save"] = count(lambda: ptsave.save({"v": value}, "c.pt", **options))
            found[key + "save_checkpoint"] = count(
                lambda: ptsave.save_checkpoint("c.pt", v=value, **options)
            )
            with ptsave.AsyncCheckpointer("steps", fsync=not fsync) as checkpointer:
                found[key + "AsyncCheckpointer.save"] = count(
                    lambda: checkpointer.save(1, v=value, **options).result()
                )
print(json.dumps(found))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_fsync_syncs_as_save_does(tmp_path: Path) -> None:
    """Counts the calls of fsync and fdatasync, for files and for directories."""
    (tmp_path / "counter.c").write_text(COUNTER)
    library = str(tmp_path / "counter.so")
    build = ["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "counter.c"), "-ldl"]
    subprocess.run(build, check=True)
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SYNCING, library],
        env={
            **os.environ,
            "LD_PRELOAD": library,
            "PYTHONPATH": str(Path(ptsave.__file__).parents[1]),
        },
        cwd=tmp_path / "run",
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    for key, counts in found.items():
        options = key.rpartition(" ")[0]
        assert counts == found[f"{options} save"], key
        _, fsync, atomic = options.split(" ")
        assert (counts[0] > 0) == (fsync == "True"), key
        assert (counts[1] > 0) == (fsync == atomic == "True"), key


@pytest.mark.parametrize("loader", LOADERS)
def test_entries_that_do_not_fit(tmp_path: Path, loader: Loader) -> None:
    saved = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5), nn.Linear(5, 1))
    restore = loader(tmp_path, {"model": saved})
    with pytest.raises(RuntimeError, match="Missing key"):
        restore(model=model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        restore(model=model, strict=False)
    kept = model.state_dict()["1.weight"].clone()
    restore(model=model, strict=False, ignore_mismatched_sizes=True)
    now = model.state_dict()
    assert torch.equal(now["0.weight"], saved.state_dict()["0.weight"])
    assert torch.equal(now["1.weight"], kept)


@pytest.mark.parametrize("loader", LOADERS)
def test_modules_are_assigned_beside_optimizers(tmp_path: Path, loader: Loader) -> None:
    saved = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(2)).sum().backward()
    optimizer.step()
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    fresh = torch.optim.AdamW(nn.Linear(2, 3).parameters())
    restore = loader(tmp_path, {"model": saved, "optimizer": optimizer, "epoch": 3})
    assert restore(model=model, optimizer=fresh, assign=True) == {"epoch": 3}
    assert_same_object(model.state_dict(), saved.state_dict())
    assert_same_object(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("loader", LOADERS)
def test_what_is_not_trusted_needs_weights_only(tmp_path: Path, loader: Loader) -> None:
    restore = loader(tmp_path, {"model": nn.Linear(1, 1), "args": argparse.Namespace(lr=1)})
    with pytest.raises(pickle.UnpicklingError):
        restore(model=nn.Linear(1, 1))
    rest = restore(model=nn.Linear(1, 1), weights_only=False)
    assert rest == {"args": argparse.Namespace(lr=1)}
    assert loader(tmp_path, {"x": torch.ones(1)})(map_location="meta")["x"].is_meta
