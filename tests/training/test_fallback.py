"""`restore(fallback=True)`: the newest checkpoint that is whole, or targets as they were."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from rank_processes import Ranks
from stock_comparison import assert_same_object, stock_load, stock_save
from test_checkpointer import after_each_listing, name_of
from torch import nn
from url_file_systems import PlainFileSystem, contents

import ptsave
from ptsave.training import fallback

STEPS = (1, 2, 3)


def flip(path: Path, record: str) -> None:
    """Change a byte in the middle of a record."""
    reader: Any = torch._C.PyTorchFileReader(str(path))
    at = reader.get_record_offset(record) + len(reader.get_record(record)) // 2
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def into_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


# What damages a file, and what the warning says of it; None if no file is left to warn of.
DAMAGE: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "payload": (lambda path: flip(path, "data/0"), "used by model.weight"),
    "pickle": (lambda path: flip(path, "data.pkl"), "data.pkl"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 30), "central directory"),
    "half": (lambda path: os.truncate(path, path.stat().st_size // 2), "central directory"),
    "empty": (lambda path: os.truncate(path, 0), "is not a checkpoint: it is empty"),
    "other file": (lambda path: path.write_bytes(b"<!DOCTYPE html>"), "is not a checkpoint"),
    "directory": (into_directory, None),
    "removed": (os.unlink, None),
}


@pytest.fixture
def run(tmp_path: Path) -> ptsave.AsyncCheckpointer:
    """Checkpoints of stock torch; those of three steps, with other values for each."""
    for step in STEPS:
        torch.manual_seed(step)
        saved = {"model": nn.Linear(300, 300).state_dict(), "step": step}
        stock_save(saved, tmp_path / name_of(step))
    return ptsave.AsyncCheckpointer(tmp_path)


@contextmanager
def warned() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]
    assert all(each.category is ptsave.CheckpointWarning for each in caught)
    assert all(each.filename == __file__ for each in caught)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("n_damaged", [0, 1, 2])
def test_the_newest_whole_step_is_restored(
    run: ptsave.AsyncCheckpointer, tmp_path: Path, kind: str, n_damaged: int
) -> None:
    damage, words = DAMAGE[kind]
    saved = {step: stock_load(tmp_path / name_of(step)) for step in STEPS}
    hurt = STEPS[::-1][:n_damaged]
    for step in hurt:
        damage(tmp_path / name_of(step))
    model = nn.Linear(300, 300)
    with warned() as texts:
        rest = run.restore(model=model, fallback=True)
    restored = 3 - n_damaged
    assert rest == {"step": restored}
    assert_same_object(dict(model.state_dict()), dict(saved[restored]["model"]))
    assert len(texts) == (n_damaged > 0 and words is not None)
    for text in texts:
        assert f"step {restored} is restored" in text
        assert str(words) in text
        named = [step for step in STEPS if str(tmp_path / name_of(step)) in text]
        assert named == sorted(hurt)


@pytest.mark.parametrize("kind", [kind for kind, (_, words) in DAMAGE.items() if words])
def test_targets_keep_their_values_if_no_step_is_whole(
    run: ptsave.AsyncCheckpointer, tmp_path: Path, kind: str
) -> None:
    """The error is that of a plain restore of the newest step."""
    for step in STEPS:
        DAMAGE[kind][0](tmp_path / name_of(step))
    model = nn.Linear(300, 300)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ptsave.CorruptCheckpointError) as plain:
        run.restore(3)
    with pytest.raises(ptsave.CorruptCheckpointError) as caught, warned() as texts:
        run.restore(model=model, fallback=True)
    is_foreign = isinstance(plain.value, ptsave.NotCheckpointError)
    assert isinstance(caught.value, ptsave.NotCheckpointError) == is_foreign
    for name in ("path", "record", "entries", "rank"):
        assert getattr(caught.value, name) == getattr(plain.value, name)
    assert_same_object(dict(model.state_dict()), before)
    said = "".join([*getattr(caught.value, "__notes__", []), *texts])
    assert [step for step in STEPS if name_of(step) in said] == [1, 2]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        ptsave.AsyncCheckpointer(tmp_path).restore(fallback=True)


def test_nothing_but_damage_makes_it_fall_back(
    run: ptsave.AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError, match="other"):
        run.restore(other=nn.Linear(2, 2), fallback=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run.restore(model=nn.Linear(2, 2), fallback=True)
    with pytest.raises(ValueError, match="fallback=True chooses the step"):
        run.restore(3, fallback=True)
    with pytest.raises(TypeError, match="fallback must be True or False"):
        run.restore(fallback=nn.Linear(2, 2))  # type: ignore[arg-type]
    read_whole = fallback.read_whole
    number = errno.EIO

    def failing_read(f: Any, *arguments: Any) -> None:
        if f.name.endswith(name_of(3)):
            raise OSError(number, os.strerror(number), f.name)
        read_whole(f, *arguments)

    monkeypatch.setattr(fallback, "read_whole", failing_read)
    with pytest.warns(ptsave.CheckpointWarning, match=f"Input/output error: .*{name_of(3)}"):
        assert run.restore(fallback=True)["step"] == 2
    for number in (errno.EACCES, errno.EMFILE, errno.ENOMEM):
        with pytest.raises(OSError, match=os.strerror(number)):
            run.restore(fallback=True)


def test_old_format_and_objects_that_are_not_trusted(tmp_path: Path) -> None:
    """A file without checksums is loaded to verify it; what it may unpickle is no damage."""
    run = ptsave.AsyncCheckpointer(tmp_path)
    old = {"model": nn.Linear(2, 2).state_dict(), "step": 1}
    stock_save(old, tmp_path / name_of(1), _use_new_zipfile_serialization=False)
    stock_save({"model": nn.Linear(2, 2), "step": 2}, tmp_path / name_of(2))
    assert run.restore(fallback=True, weights_only=False)["step"] == 2
    os.truncate(tmp_path / name_of(2), 500)
    with pytest.warns(ptsave.CheckpointWarning, match="step 1 is restored"):
        assert run.restore(fallback=True)["step"] == 1
    os.truncate(tmp_path / name_of(1), 100)
    with pytest.raises(ptsave.CorruptCheckpointError, match=name_of(2)):
        run.restore(fallback=True)


def test_steps_that_another_process_removes(
    run: ptsave.AsyncCheckpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not damaged, so nothing warns; a new step is found."""

    def removed() -> None:
        if (tmp_path / name_of(3)).exists():
            (tmp_path / name_of(3)).rename(tmp_path / name_of(4))

    after_each_listing(monkeypatch, removed)
    assert run.restore(fallback=True)["step"] == 3
    assert run.steps() == [1, 2, 4]


def test_the_step_that_is_verified_stays(
    run: ptsave.AsyncCheckpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkpointer of this process saves and prunes, while a step is verified."""
    read_whole, other = fallback.read_whole, ptsave.AsyncCheckpointer(tmp_path, keep=1)
    flip(tmp_path / name_of(3), "data/0")

    def slow_read(f: Any, *arguments: Any) -> None:
        read_whole(f, *arguments)
        if f.name.endswith(name_of(2)):
            other.save(9, step=9).result()
            other.wait()

    monkeypatch.setattr(fallback, "read_whole", slow_read)
    with pytest.warns(ptsave.CheckpointWarning, match="step 2 is restored"):
        assert run.restore(fallback=True)["step"] == 2
    assert run.steps() == [9]


@pytest.mark.usefixtures("_clean_file_systems")
def test_urls(tmp_path: Path) -> None:
    run = ptsave.AsyncCheckpointer("plain://run")
    for step in STEPS:
        run.save(step, model={"w": torch.full((300,), float(step))}, step=step).result()
    run.wait()
    path = tmp_path / "damaged.pt"
    (url,) = [path for path in contents("plain") if name_of(3) in path]
    path.write_bytes(contents("plain")[url])
    flip(path, "data/0")
    PlainFileSystem().pipe_file(url, path.read_bytes())
    target = {"w": torch.zeros(300)}
    with pytest.warns(ptsave.CheckpointWarning, match=f"{name_of(3)}: .*used by model.w"):
        assert run.restore(model=target, fallback=True) == {"step": 2}
    assert torch.equal(target["w"], torch.full((300,), 2.0))


# ---------------------------------------------------------------------------------------- ranks

RANKS = """
import shutil, warnings
def damage(path):
    data = bytearray(path.read_bytes())
    data[data.find(torch.tensor([7.0, step]).numpy().tobytes())] ^= 1
    path.write_bytes(data)

if mode == "replicas":
    make = lambda: ptsave.AsyncCheckpointer(folder / f"own-{rank}", rank=rank)
else:
    options = {} if in_group else {"rank": rank, "world_size": size}
    make = lambda: ptsave.AsyncCheckpointer(folder / "run", **options)
run = make()
for step in (1, 2, 3):
    run.save(step, value={"x": torch.tensor([7.0, step]).repeat(100)}, step=step)
run.wait()
target = {"x": torch.zeros(200)}

def restore():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = run.restore(value=target, fallback=True)["step"]
    return [step, target["x"][1].item(), [str(each.message) for each in caught]]

attempt("whole", restore)
step = 3
if rank == 1:
    damage(run.path(3))
attempt("newest", restore)
step = 2
if rank == 0:
    damage(run.path(2))
attempt("two", restore)
step = 1
if rank == 1:
    damage(run.path(1))
target["x"].zero_()
attempt("all", restore)
found["untouched"] = not target["x"].any()
run.close()
"""


@pytest.mark.parametrize("mode", ["group", "files", "replicas"])
def test_all_ranks_take_the_same_step(tmp_path: Path, mode: str) -> None:
    """Ranks with a process group, without one, and replicas, of which each has its own copy."""
    program = f"mode = {mode!r}\n" + dedent(RANKS)
    ranks = Ranks(tmp_path, program, 2, in_group=mode != "files").found()
    for rank, found in enumerate(ranks):
        assert found["whole"] == [3, 3, []]
        assert found["newest"][:2] == [2, 2]
        assert found["two"][:2] == [1, 1]
        for name, n_files in (("newest", 1), ("two", 2)):
            (text,) = found[name][2]
            assert text.count("used by value.x") == n_files
        assert found["all"].startswith("CorruptCheckpointError"), found["all"]
        assert ("rank 1 could not" in found["all"]) == (rank == 0)
        assert found["untouched"]


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    program = dedent(RANKS).partition("attempt(")[0] + dedent(
        """
        if rank == 1:
            run.path(3).unlink()
        run.wait()
        attempt("missing", restore)
        run.close()
        """
    )
    for found in Ranks(tmp_path, "mode = 'group'\n" + program, 2).found():
        assert found["missing"] == [2, 2, []]
