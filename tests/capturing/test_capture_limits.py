"""Limits of captures: memory, full disks, kills, several ranks, targets that are no files."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from _system import Child, mounted
from captured_runs import Run, captured
from rank_processes import Ranks
from torch import nn

import ptsave
from ptsave.background import saves
from ptsave.capturing.capture import Capture, _default_staged_nbytes
from ptsave.capturing.run import CapturedRun
from ptsave.capturing.schema import parse_name
from ptsave.sources.locations import rivals_of
from ptsave.support import config

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pt"


def recovered(folder: Path) -> dict[str, Any]:
    """Return the entries of the only temporary file in a directory."""
    (leftover,) = folder.glob(".run.pt.*.ptsave")
    with ptsave.open(leftover, recover=True) as archive:
        obj: Any = archive._contents.obj
        return {name: archive[name] for name in obj}


# ------------------------------------------------------------------------------------------ memory


def test_the_default_of_memory_on_its_way_from_accelerators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Is 1 GiB, or less in a small container, or one that many ranks share."""
    monkeypatch.setattr(config, "share_nbytes", lambda n_ranks: (64 << 30) // n_ranks)
    assert _default_staged_nbytes() == 1024 * MIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert _default_staged_nbytes() == 512 * MIB
    monkeypatch.setenv("PTSAVE_MAX_STAGED_BYTES", f"{7 * MIB}")
    assert _default_staged_nbytes() == 7 * MIB


def test_sizes_are_texts_or_numbers(path: Path) -> None:
    with ptsave.ArchiveWriter(path, max_memory_bytes="1.5KB") as writer:
        assert writer._max_nbytes == 1500
    for size in ("1 parsec", 1.5):
        with pytest.raises((ValueError, TypeError)):
            ptsave.ArchiveWriter(path, max_memory_bytes=size)  # type: ignore[arg-type]
    capture = ptsave.capture(nn.Identity(), path, max_bytes=np.int64(5), max_memory_bytes="2MB")  # type: ignore[arg-type]
    options = capture._options
    assert (options.max_bytes, options.max_memory_bytes) == (5, 2_000_000)


def test_errors_name_the_option_of_an_archive(path: Path) -> None:
    with ptsave.ArchiveWriter(path, max_memory_bytes=1000) as writer:
        with pytest.raises(ptsave.StagingFullError, match="raise max_memory_bytes") as caught:
            writer.add("large", torch.ones(1000))
        assert "ptsave.save" not in str(caught.value)
        assert caught.value.max_staged_bytes == 1000
    with pytest.raises(ptsave.StagingFullError, match=r"raise max_staged_bytes .*ptsave\.save"):
        ptsave.async_save(torch.ones(1000), io.BytesIO(), max_staged_bytes=1000)
    model = nn.Identity()
    with (
        pytest.raises(ptsave.StagingFullError, match="raise max_memory_bytes"),
        ptsave.capture(model, path, max_memory_bytes=100_000),
    ):
        model(torch.ones(100_000))


@pytest.mark.parametrize("when_full", ["wait", "drop", "raise"])
def test_what_finds_no_room(path: Path, when_full: Any) -> None:
    """Tensors are left out, or raise; records of calls are complete either way."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    options: dict[str, Any] = {"max_memory_bytes": "500KB", "when_full": when_full}
    large, small = torch.ones(200_000), torch.ones(50_000)

    def run() -> None:
        for _ in range(20):
            model(small)
        if when_full == "drop":
            model(large)

    try:
        captures = captured(model, run, path, **options)
    except ptsave.StagingFullError:
        assert when_full == "raise"
        captures = Run(path)  # it is complete but for the call that raised
        assert captures.entries["capture/end"]["steps"] == 1
        return
    assert len(captures.calls) == (63 if when_full == "drop" else 60)
    assert saves._budget._held == {}
    if when_full == "drop":
        value = captures.values["0/forward/#20/inputs/0"]
        assert value.note == "dropped: no room in memory"
        assert captures.entries["capture/end"]["dropped"] >= 1
    else:
        assert all(value.note == "" for value in captures.values.values())


@pytest.mark.parametrize("when_full", ["wait", "drop", "raise"])
def test_memory_that_no_record_fits_into(path: Path, when_full: Any) -> None:
    with pytest.raises(ptsave.StagingFullError, match="raise max_memory_bytes"):
        ptsave.capture(nn.Identity(), path, max_memory_bytes=100, when_full=when_full).start()
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("nbytes", [0, 3000, 60_000, 1_000_000])
@pytest.mark.parametrize("when_full", ["wait", "drop", "raise"])
def test_a_tensor_that_all_of_the_memory_has_no_room_for(
    path: Path, when_full: Any, nbytes: int
) -> None:
    """It is left out with a note, or the hook says which one it is; nothing fails later."""
    model = nn.Identity()
    budget = 2000 + nbytes // 2
    capture = ptsave.capture(model, path, max_memory_bytes=budget, when_full=when_full).start()
    capture._writer.flush()  # of the header
    too_large = nbytes > budget
    if too_large and when_full != "drop":
        with pytest.raises(ptsave.StagingFullError, match=r"^0/forward/#0/inputs/0: .*raise max"):
            model(torch.ones(nbytes, dtype=torch.uint8))
    else:
        model(torch.ones(nbytes, dtype=torch.uint8))
    capture.step()
    capture.stop()
    assert saves._budget._held == {}
    found = Run(path)
    if when_full == "drop":
        value = found.values["0/forward/#0/inputs/0"]
        assert value.note == ("dropped: no room in memory" if too_large else "")
        assert capture.dropped == too_large
    assert [call.status for call in found.calls] == (
        ["raised"] if too_large and when_full != "drop" else ["returned"]
    )


@pytest.mark.parametrize("when_full", ["wait", "drop", "raise"])
def test_small_tensors_together_are_no_larger_than_the_memory(path: Path, when_full: Any) -> None:
    """Nor does it matter that the records of a step are."""
    model = nn.Sequential(*[nn.Identity() for _ in range(100)])
    with ptsave.capture(model, path, max_memory_bytes=20_000, when_full=when_full) as capture:
        for step in range(3):
            x = torch.full((300,), float(step))
            for i in range(10):
                model(x + i)
                capture._writer.flush()  # so that there is room
            capture.step()
    found = Run(path)
    assert len(found.calls) == 3 * 10 * 101
    assert capture.dropped == 0
    assert all(value.note == "" for value in found.values.values())
    for step in range(3):
        assert found.tensor(f"{step}/forward/7#9/outputs").eq(step + 9).all()


class Expanding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., None].expand(*x.shape, 10**10)


def test_an_expanded_tensor_is_written_as_its_memory(path: Path) -> None:
    model = Expanding()
    base = torch.arange(100_000.0)
    inputs = {
        0: torch.tensor(2.5),
        1: torch.tensor([1.0, 2.0, 3.0]),
        2: base,
        3: base[10:20],  # whose memory has more, which is not written
    }

    def run() -> None:
        for x in inputs.values():
            model(x)

    found = captured(model, run, path, max_bytes="1MB")
    assert path.stat().st_size < 1_000_000
    for i, x in inputs.items():
        name = f"0/forward/#{i}/outputs"
        tensor = found.tensor(name)
        assert tensor.shape == (*x.shape, 10**10)
        assert torch.equal(tensor[..., 7], x)
        assert found.values[name].nbytes == 4 * 10**10 * x.numel()
        assert found.values[name].note.endswith("B: no statistics")
        assert found.values[name].note.startswith("expanded to ")
    assert found.tensor("0/forward/#3/outputs").untyped_storage().nbytes() == 40
    assert ptsave.compare_captures(path, path).equal


def test_an_expanded_tensor_of_usual_size_has_statistics(path: Path) -> None:
    model = nn.Identity()
    x = torch.tensor([1.0, -3.0])[:, None].expand(2, 100_000)
    found = captured(model, lambda: model(x), path, what=["outputs"])
    value = found.values["0/forward/#0/outputs"]
    assert value.statistics is not None
    assert value.statistics.numel == 200_000
    assert value.statistics.mean == pytest.approx(-1.0)
    assert torch.equal(found.tensor(value.name), x)
    assert path.stat().st_size < 10_000


def test_fsync_is_carried_through(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    finish = ptsave.ArchiveWriter.close

    def close(writer: ptsave.ArchiveWriter) -> None:
        found.append(writer._fsync)
        finish(writer)

    monkeypatch.setattr(ptsave.ArchiveWriter, "close", close)
    for fsync in (False, True):
        model = nn.Identity()
        captured(model, lambda model=model: model(torch.ones(2)), path, fsync=fsync)  # type: ignore[misc]
    assert found == [False, True]


# ------------------------------------------------------------------------------------------- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "none") as disk:
        yield disk


def fill_disk(model: nn.Module, capture: Capture) -> None:
    for i in range(1000):
        model(torch.full((50_000,), float(i)))
        capture.step()
        time.sleep(0.005)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when_full", ["wait", "drop", "raise"])
def test_a_full_disk(small_disk: Path, when_full: Any) -> None:
    """Ends the capture by an error in a hook; the steps before are in the file that it names."""
    model = nn.Sequential(nn.Identity())
    path = small_disk / "run.pt"
    with (
        pytest.raises(ptsave.SaveError, match=r"No space left on device.*recover=True") as caught,
        ptsave.capture(model, path, when_full=when_full) as capture,
    ):
        fill_disk(model, capture)
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()
    assert saves._budget._held == {}
    assert not model[0]._forward_hooks
    entries = recovered(small_disk)
    assert "capture/end" not in entries
    check_steps(entries, 50_000)


def test_a_full_disk_at_the_end(small_disk: Path) -> None:
    model = nn.Identity()
    capture = ptsave.capture(model, small_disk / "run.pt").start()
    model(torch.ones(10))
    capture._writer.flush()
    model(torch.ones(2 * MIB))
    with pytest.raises(ptsave.SaveError, match="recover=True"):
        capture.stop()
    capture.stop()  # there is nothing more to do
    assert "capture" in recovered(small_disk)


def test_a_full_disk_keeps_what_it_has_room_for(small_disk: Path) -> None:
    """Also where nothing had been written before: everything is one batch."""
    model = nn.Sequential(nn.Identity())

    def program() -> None:
        with ptsave.capture(model, small_disk / "run.pt", what=["inputs"]) as capture:
            for step in range(5):
                model(torch.full((300_000,), float(step)))
                capture.step()

    with pytest.raises(ptsave.SaveError, match=r"No space left on device.*recover=True"):
        program()
    assert check_steps(recovered(small_disk), 300_000) == 3


def check_steps(entries: dict[str, Any], n: int) -> int:
    """Compare what was recorded of steps with the values that they had; return their number."""
    assert next(iter(entries)) == "capture"
    run = CapturedRun(entries, "run.pt")
    steps = sorted({call.step for call in run.calls()})
    assert steps == list(range(len(steps)))
    for value in run.values():
        step = parse_name(value.name).step
        assert torch.equal(entries[value.stored], torch.full((n,), float(step)))
    return len(steps)


def train_for_ever(path: Path, seed: int) -> NoReturn:
    model = nn.Sequential(nn.Identity())
    step = 0
    capture = ptsave.capture(model, path, fsync=seed % 2 == 0).start()
    while True:
        model(torch.full((1000 + 20_000 * (seed % 3),), float(step)))
        capture.step()
        step += 1
        time.sleep(0.002)


@pytest.mark.timeout(120)
def test_kills(tmp_path: Path) -> None:
    """Whenever it comes, all that was written before is read, in whole steps of right values."""
    total = 0
    for i, seconds in enumerate((0.0, 0.05, 0.1, 0.2, 0.3, 0.5)):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        child = Child(functools.partial(train_for_ever, folder / "run.pt", i))
        time.sleep(seconds)
        child.kill()
        assert not (folder / "run.pt").exists()
        try:
            entries = recovered(folder)
        except (ValueError, ptsave.CorruptCheckpointError):
            continue  # it had not begun, or had not finished a batch
        total += check_steps(entries, 1000 + 20_000 * (i % 3))
    assert total > 0


# ------------------------------------------------------------------------------------------ targets


def test_targets(path: Path) -> None:
    model = nn.Identity()
    for target, kind, message in (
        ("s3://bucket/run.pt", ptsave.UnsupportedUrlError, "only local files"),
        (io.BytesIO(), TypeError, "path must be a str or an os.PathLike of str, not BytesIO"),
        (path.parent, IsADirectoryError, "Is a directory"),
        (path / "no" / "run.pt", FileNotFoundError, "does not exist"),
        ("/dev/full", ptsave.SaveError, "not a regular file"),
        (f"{path.parent}/", IsADirectoryError, "names a directory: give the name of a file in it"),
        (f"{path}/", ptsave.SaveError, "names a directory: give the name of a file in it"),
        ("", ptsave.SaveError, "names a directory"),
        (f"{path}\0", ValueError, "path must not have a NUL character"),
        (os.fsencode(path), TypeError, "path must be a str or an os.PathLike of str, not bytes"),
    ):
        with pytest.raises(kind, match=message):
            ptsave.capture(model, target).start()  # type: ignore[arg-type]
        assert not model._forward_hooks
    captured(model, lambda: model(torch.ones(2)), path)
    with ptsave.capture(model, str(path)):  # it replaces the one before
        model(torch.ones(3))
    assert Run(path).tensor("0/forward/#0/inputs/0").numel() == 3
    assert os.listdir(path.parent) == ["run.pt"]


def test_two_captures_of_one_path(path: Path) -> None:
    """The second is refused, and says what the first one is; after its end the path is free."""
    model, other = nn.Linear(2, 2), nn.Identity()
    with ptsave.capture(model, path) as capture:
        model(torch.ones(1, 2))
        for again in (path, os.path.relpath(path), path.parent / "." / path.name):
            with pytest.raises(RuntimeError, match=r"Capture of Linear to .*in step 0> is writing"):
                ptsave.capture(other, again).start()
        assert not other._forward_hooks
        capture.step()
        captured(other, lambda: other(torch.ones(3)), path.with_name("other.pt"))
    assert Run(path).tensor("0/forward/#0/inputs/0").shape == (1, 2)
    captured(other, lambda: other(torch.ones(3)), path)
    assert sorted(os.listdir(path.parent)) == ["other.pt", "run.pt"]


def test_a_capture_beside_another_process(path: Path) -> None:
    model = nn.Identity()
    child = Child(functools.partial(train_for_ever, path, 0))
    while not rivals_of(str(path.parent / f".{path.name}.{'0' * 16}.ptsave")):  # it has its lock
        time.sleep(0.01)
    with pytest.raises(
        RuntimeError, match=r"another process.* is writing this file \(as .*\.ptsave"
    ):
        ptsave.capture(model, path).start()
    child.kill()
    captured(model, lambda: model(torch.ones(2)), path)  # what it has left is no writer
    assert os.listdir(path.parent) == ["run.pt"]


@pytest.mark.parametrize("n", [3, 230])
def test_rivals(tmp_path: Path, n: int) -> None:
    path = tmp_path / ("r" * n)
    with ptsave.ArchiveWriter(path) as one, ptsave.ArchiveWriter(path) as other:
        assert rivals_of(one.temporary_path) == [other.temporary_path]
        assert rivals_of(other.temporary_path) == [one.temporary_path]
        with ptsave.ArchiveWriter(tmp_path / "else") as third:
            assert rivals_of(third.temporary_path) == []
    assert one.temporary_path == ""


def test_what_a_capture_says_of_itself(path: Path) -> None:
    capture = ptsave.capture(nn.Identity(), path)
    assert repr(capture) == f"<ptsave.Capture of Identity to {str(path)!r}, not started>"
    assert (capture.stored_nbytes, capture.dropped) == (0, 0)
    with capture:
        capture._model(torch.ones(2))
        capture.step()
        assert "in step 1" in repr(capture)
    assert "ended" in repr(capture)


# -------------------------------------------------------------------------------------------- ranks

RANK_OF_TWO = """
import warnings
warnings.simplefilter("error")
model, folder = torch.nn.Identity(), str(folder)

def run(path, **options):
    with ptsave.capture(model, path, **options):
        model(torch.full((2,), float(rank)))
    return "written"

capture = ptsave.capture(model, folder + "/early.pt")
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2)
attempt("unnamed", lambda: run(folder + "/unnamed.pt"))
attempt("shared", lambda: run(folder + "/shared.pt", rank=0))
attempt("own", lambda: run(folder + f"/own-{rank}.pt", rank=rank))
attempt("early", capture.start)
dist.barrier()
dist.destroy_process_group()
attempt("after", lambda: run(folder + f"/after-{rank}.pt"))
"""


def test_two_ranks(tmp_path: Path) -> None:
    zero, one = ranks = Ranks(tmp_path, RANK_OF_TWO, 2, in_group=False).found()
    for rank, found in enumerate(ranks):
        assert found["unnamed"].startswith(
            f"RuntimeError: {tmp_path}/unnamed.pt: this job has 2 ranks, and each would replace"
        )
        assert "rank=rank" in found["unnamed"]
        assert found["early"].startswith("RuntimeError: ")
        assert "this job has 2 ranks" in found["early"]
        assert found["own"] == found["after"] == "written"
        run = Run(tmp_path / f"own-{rank}.pt")
        assert run.tensor("0/forward/#0/inputs/0").tolist() == [rank, rank]
    assert zero["shared"] == "written"
    assert "this process is rank 1, and the file belongs to rank 0" in one["shared"]


def test_ranks_of_a_launcher(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Identity()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(RuntimeError, match="this job has 4 ranks"):
        ptsave.capture(model, path).start()
    with pytest.raises(RuntimeError, match="is rank 2"):
        ptsave.capture(model, path, rank=0).start()
    captured(model, lambda: model(torch.ones(2)), path, rank=2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    captured(model, lambda: model(torch.ones(2)), path)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam"},
        {"fsync": "x"},
        {"statistics": "no"},
        {"tensors": None},
        {"call_stacks": 1},
        {"what": 5},
        {"what": [b"inputs"]},
        {"include": 5},
        {"include": [re.compile("x")]},
        {"exclude": None},
        {"steps": 5},
        {"steps": "100"},
        {"steps": iter([1])},
        {"rank": "a"},
        {"rank": True},
        {"rank": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_of_another_type_is_refused_before_anything_is_done(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=next(iter(options))):
        ptsave.capture(model, tmp_path / "run.pt", **options)
    with pytest.raises(TypeError, match="model must be"):
        ptsave.capture([model], tmp_path / "run.pt")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_ranks_are_numbers_from_0_on(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="rank must be an integer of at least 0, or None, not -1"):
        ptsave.capture(model, tmp_path / "run.pt", rank=-1)
    capture = ptsave.capture(model, tmp_path / "run.pt", rank=np.int64(3))  # type: ignore[arg-type]
    assert capture._options.rank == 3


def test_a_pattern_that_matches_no_module_is_told(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.warns(ptsave.CheckpointWarning, match=r"no module .* matches 'layers\.\*'"):
        captured(model, lambda: model(torch.ones(1, 2)), path, include=["0", "layers.*"])
    with pytest.raises(ValueError, match="select no module"):
        ptsave.capture(model, path, include="layers.*").start()


def test_hooks_are_removed_if_the_optimizer_takes_none(tmp_path: Path) -> None:
    class Refusing:
        def register_step_post_hook(self, _hook: object) -> NoReturn:
            raise RuntimeError("no hooks")

    model = nn.Linear(2, 2)
    capture = ptsave.capture(model, tmp_path / "run.pt", optimizer=Refusing())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no hooks"):
        capture.start()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert list(tmp_path.iterdir()) == []
