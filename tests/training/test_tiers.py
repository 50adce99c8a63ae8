"""Checkpoints of one process in several places: a local directory and a slow place of any kind."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import eventually, mounted, needs_root
from s3_server import S3Server
from stock_comparison import stock_load, stock_save
from test_checkpointer import name_of
from torch import nn
from url_file_systems import GUARDED, TOKEN, failing, guarded
from warm_python import run_warm

import ptsave
from ptsave.sources.locations import LocalFolder
from ptsave.training import tiers
from ptsave.training.directory import MANIFEST

xxhash: Any = pytest.importorskip("xxhash", reason="manifests have digests of the xxhash library")
pytestmark = pytest.mark.usefixtures("_clean_file_systems", "_everything_is_closed")

S3_URL = "s3://bucket/run"


@pytest.fixture
def _everything_is_closed(request: pytest.FixtureRequest) -> Iterator[None]:
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    eventually(lambda: not any(t.name.startswith("ptsave") for t in threading.enumerate()))
    gc.collect()  # errors refer to files
    if "s3" not in request.node.name:  # its client has connections of its own
        assert len(os.listdir("/proc/self/fd")) <= descriptors


class Slow:
    """A slow place: a directory, or a URL of a file system `fs` in which files have `prefix`."""

    def __init__(self, place: Any, options: Any = None, fs: Any = None, prefix: str = "") -> None:
        self.place, self.options, self.fs, self.prefix = place, options, fs, prefix

    def names(self) -> list[str]:
        if self.fs is None:
            return sorted(name for name in os.listdir(self.place) if not name.startswith("."))
        self.fs.invalidate_cache()
        return sorted(path.rpartition("/")[2] for path in self.fs.find(self.prefix))

    def read(self, name: str) -> bytes:
        if self.fs is None:
            return bytes((self.place / name).read_bytes())
        return bytes(self.fs.cat_file(f"{self.prefix}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        if self.fs is None:
            (self.place / name).write_bytes(data)
        else:
            self.fs.pipe_file(f"{self.prefix}/{name}", data)


@pytest.fixture
def slow(request: pytest.FixtureRequest, tmp_path: Path, _clean_file_systems: None) -> Any:
    """A slow place; at a guarded URL, unless a test asks for another kind."""
    kind = getattr(request, "param", "guarded")
    if kind == "directory":
        return Slow(tmp_path / "slow")
    if kind == "guarded":
        return Slow(f"{GUARDED}://run", TOKEN, guarded(), "/run")
    s3fs = pytest.importorskip("s3fs", reason="fsspec reaches S3 by s3fs: pip install s3fs")
    server: S3Server = request.getfixturevalue("server")
    fs = s3fs.S3FileSystem(**server.options)
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    return Slow(S3_URL, server.options, fs, "bucket/run")


everywhere = pytest.mark.parametrize("slow", ["directory", "guarded", "s3"], indirect=True)
near_and_far = pytest.mark.parametrize("slow", ["directory", "guarded"], indirect=True)


def make(slow: Slow, tmp_path: Path, **options: Any) -> ptsave.AsyncCheckpointer:
    return ptsave.AsyncCheckpointer(
        slow.place, local=tmp_path / "fast", storage_options=slow.options, **options
    )


def value(step: float) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step))}


def save(run: ptsave.AsyncCheckpointer, step: int, what: float | None = None) -> None:
    run.save(step, x=value(step if what is None else what), step=step).result()


def restored(run: ptsave.AsyncCheckpointer, *step: int, **options: Any) -> tuple[int, float]:
    """Return the step that is restored, and the value of all its elements."""
    target = value(-1)
    rest = run.restore(*step, x=target, **options)
    (found,) = target["w"].unique().tolist()
    return rest["step"], found


def with_manifests(*steps: int) -> list[str]:
    return sorted(name_of(step) + end for step in steps for end in ("", MANIFEST))


def fast_names(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "fast"))


def damage(read: Callable[[], bytes], write: Callable[[bytes], object], step: float) -> None:
    """Change a bit of the values of a checkpoint of `value(step)`."""
    data = bytearray(read())
    data[data.index(value(step)["w"][:2].numpy().tobytes()) + 3] ^= 1
    write(bytes(data))


def file_of(tmp_path: Path, step: int) -> tuple[Callable[[], bytes], Callable[[bytes], object]]:
    path = tmp_path / "fast" / name_of(step)
    return path.read_bytes, path.write_bytes


def damage_fast(tmp_path: Path, step: int) -> None:
    damage(*file_of(tmp_path, step), step)


def damage_slow(slow: Slow, step: int) -> None:
    damage(lambda: slow.read(name_of(step)), lambda data: slow.write(name_of(step), data), step)


@contextmanager
def warned() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]
    assert all(each.category is ptsave.CheckpointWarning for each in caught), texts


# -------------------------------------------------------------------------------------- copies


@everywhere
def test_places_of_the_steps(slow: Slow, tmp_path: Path) -> None:
    keep = {"local": 2, "remote": 3}
    with make(slow, tmp_path, every={"remote": 2}, keep=keep) as run:
        assert (run.steps(), run.latest(), run.protected()) == ([], None, None)
        for step in range(1, 10):
            save(run, step)
            run.wait()
        assert run.steps() == [4, 6, 8, 9]
        assert run.protected() == 8
        assert run.latest() == tmp_path / "fast" / name_of(9) == run.path(9)
    assert fast_names(tmp_path) == with_manifests(8, 9)
    assert slow.names() == with_manifests(4, 6, 8)
    stock_save({"x": value(8), "step": 8}, tmp_path / name_of(8))
    expected = (tmp_path / name_of(8)).read_bytes()
    assert expected == (tmp_path / "fast" / name_of(8)).read_bytes() == slow.read(name_of(8))
    manifest = json.loads(slow.read(name_of(8) + MANIFEST))
    assert manifest["digest"] == xxhash.xxh3_128(expected).hexdigest()
    assert manifest["nbytes"] == len(expected)
    near = json.loads((tmp_path / "fast" / (name_of(8) + MANIFEST)).read_bytes())
    assert manifest["places"] == near["places"][::-1]  # the own place first
    assert str(slow.place) == manifest["places"][0]
    assert {**near, "places": []} == {**manifest, "places": []}
    again = make(slow, tmp_path)
    assert again.steps() == [4, 6, 8, 9]
    assert restored(again) == (9, 9)
    assert restored(again, 4) == (4, 4)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 5, only of 4, 6, 8, 9"):
        again.restore(5)


@everywhere
def test_the_local_directory_is_lost(slow: Slow, tmp_path: Path) -> None:
    with make(slow, tmp_path, every={"remote": 2}) as run:
        for step in (1, 2, 3):
            save(run, step)
    shutil.rmtree(tmp_path / "fast")
    with make(slow, tmp_path) as run:
        assert run.steps() == [2] == [run.protected()]
        assert restored(run) == (2, 2)
        assert fast_names(tmp_path) == ([] if slow.fs is None else with_manifests(2))
        if slow.fs is not None:  # a URL is read once
            slow.write(name_of(2), b"")
        assert restored(run) == (2, 2)
        assert restored(run, 2, weights_only=False, map_location="cpu") == (2, 2)


@near_and_far
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("is_slow", [False, True])
def test_damaged_copies(slow: Slow, tmp_path: Path, is_fast: bool, is_slow: bool) -> None:
    with make(slow, tmp_path) as run:
        for step in (1, 2, 3):
            save(run, step)
    if is_fast:
        damage_fast(tmp_path, 3)
    if is_slow:
        damage_slow(slow, 3)
    if is_fast and is_slow:
        target = value(-1)
        with pytest.raises(ptsave.CorruptCheckpointError, match=r"used by x\.w") as caught:
            run.restore(x=target)
        assert caught.value.path == str(tmp_path / "fast" / name_of(3))
        assert torch.equal(target["w"], value(-1)["w"])
    with warned() as texts:
        assert restored(run, fallback=True) == ((2, 2) if is_fast and is_slow else (3, 3))
    assert len(texts) == is_fast
    if is_fast:
        assert str(tmp_path / "fast" / name_of(3)) in texts[0]
        assert texts[0].count("used by x.w") == 1 + (is_slow and slow.fs is None)
    if slow.fs is not None and is_fast and not is_slow:
        with warned() as texts:  # the copy from the URL has replaced the damaged file
            assert restored(run) == (3, 3)
        assert texts == []


@near_and_far
def test_files_without_checksums_are_compared_with_their_digests(
    slow: Slow, tmp_path: Path
) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        with make(slow, tmp_path) as run:
            save(run, 1)
            save(run, 2)
    finally:
        torch.serialization.set_crc32_options(True)
    damage_fast(tmp_path, 2)
    with warned() as texts:
        assert restored(run) == (2, 2)
    assert sum("as in its manifest" in text for text in texts) == 1
    damage_slow(slow, 2)
    damage_fast(tmp_path, 2)
    with warned():
        assert restored(run, fallback=True) == (1, 1)


@pytest.mark.parametrize("kind", ["removed", "garbage", "directory", "stale", "of another file"])
def test_manifests_are_no_condition(slow: Slow, tmp_path: Path, kind: str) -> None:
    """A restore needs none, unless two saves of one step have to be told apart."""
    with make(slow, tmp_path) as run:
        save(run, 1)
        save(run, 2)
    path = tmp_path / "fast" / (name_of(2) + MANIFEST)
    data = path.read_bytes()
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind != "removed":
        stale = {**json.loads(data), "digest": "0" * 32}
        other = {**json.loads(data), "file": name_of(1)}
        texts = {"stale": json.dumps(stale), "of another file": json.dumps(other)}
        path.write_text(texts.get(kind, "\0{["))
    assert restored(run) == (2, 2)
    damage_slow(slow, 2)
    assert restored(run) == (2, 2)  # the local file, or the copy that was fetched before
    save(run := make(slow, tmp_path), 3)
    run.close()
    assert run.protected() == 3


def test_a_run_that_began_without_a_local_directory(slow: Slow, tmp_path: Path) -> None:
    with ptsave.AsyncCheckpointer(slow.place, storage_options=slow.options) as run:
        for step in (1, 2, 3):
            save(run, step)
    with make(slow, tmp_path) as run:
        assert run.steps() == [1, 2, 3]
        assert restored(run) == (3, 3)
        save(run, 3, 33)
        run.wait()
        assert restored(run) == (3, 33)
        save(run, 4)
    assert slow.names() == sorted([name_of(2), *with_manifests(3, 4)])
    shutil.rmtree(tmp_path / "fast")
    run = make(slow, tmp_path)
    assert restored(run, 3) == (3, 33)
    assert restored(run, 2) == (2, 2)


@near_and_far
def test_a_process_that_ends_before_the_manifest(slow: Slow, tmp_path: Path) -> None:
    """The file of the new save is there, and no copy.  It is newer than the copies of the old."""
    with make(slow, tmp_path) as run:
        save(run, 5)
    (tmp_path / "fast" / (name_of(5) + MANIFEST)).unlink()
    stock_save({"x": value(55), "step": 5}, tmp_path / "fast" / name_of(5))
    with make(slow, tmp_path) as run:
        assert run.steps() == [5]
        assert restored(run) == (5, 55)
        damage(*file_of(tmp_path, 5), 55)
        with warned() as texts:
            assert restored(run) == (5, 5)
        assert len(texts) == 1


@near_and_far
def test_a_step_that_is_saved_twice(slow: Slow, tmp_path: Path) -> None:
    with make(slow, tmp_path) as run:
        for what in (5.0, 55.0):
            run.save(5, x=value(what), step=5)
        run.wait()
        assert restored(run) == (5, 55)
        manifests = [slow.read(name_of(5) + MANIFEST)]
        manifests.append((tmp_path / "fast" / (name_of(5) + MANIFEST)).read_bytes())
        assert len({json.loads(each)["save"] for each in manifests}) == 1
        tokens = make(slow, tmp_path, every={"remote": 2})
        save(tokens, 5, 555)  # only here
        tokens.wait()
        assert restored(run) == (5, 555)
        assert run.protected() == 5
    shutil.rmtree(tmp_path / "fast")
    assert restored(make(slow, tmp_path)) == (5, 55)


def test_training_that_went_back(slow: Slow, tmp_path: Path) -> None:
    with make(slow, tmp_path, keep={"local": 1, "remote": 2}) as run:
        for step in (10, 11):
            save(run, step)
            run.wait()
        with pytest.warns(ptsave.CheckpointWarning, match="a checkpoint of step 11 is there"):
            save(run, 5)
        run.wait()
        assert fast_names(tmp_path) == with_manifests(5, 11)
        assert slow.names() == with_manifests(5, 11)
        assert restored(run) == (11, 11)
        assert restored(run, 5) == (5, 5)
        run.remove(11)
        assert restored(run) == (5, 5)
        save(run, 6)
    assert fast_names(tmp_path) == with_manifests(6)


def test_rules_of_the_slow_place(slow: Slow, tmp_path: Path) -> None:
    """Those for the best and the marked ones are for the slow place alone."""
    rules: dict[str, Any] = {"keep_best": 1, "metric": "loss", "keep_marked": "marked"}
    keep = {"local": 1, "remote": 1}
    with make(slow, tmp_path, keep=keep, keep_every=4, **rules) as run:
        for step in range(1, 9):
            run.save(step, x=value(step), loss=abs(step - 2), marked=step == 3, step=step)
            run.wait()
    assert slow.names() == with_manifests(2, 3, 4, 8)
    assert fast_names(tmp_path) == with_manifests(8)
    assert run.steps() == [2, 3, 4, 8]
    with make(slow, tmp_path, keep={"local": None, "remote": None}) as run:
        for step in (9, 10, 11, 12):
            save(run, step)
    assert slow.names() == with_manifests(2, 3, 4, 8, 9, 10, 11, 12)
    assert fast_names(tmp_path) == with_manifests(8, 9, 10, 11, 12)


def test_removed_steps(slow: Slow, tmp_path: Path) -> None:
    with make(slow, tmp_path, every={"remote": 2}) as run:
        for step in (1, 2, 3):
            save(run, step)
        run.remove(2)
        assert run.steps() == [1, 3]
        run.save(4, x=value(4))
        run.remove(4)
        run.remove(1)
        for step in (1, 2, 9):
            with pytest.raises(FileNotFoundError, match=f"no checkpoint of step {step}, only of 3"):
                run.remove(step)
    assert fast_names(tmp_path) == with_manifests(3)
    assert slow.names() == []
    shutil.rmtree(tmp_path / "fast")
    with pytest.raises(FileNotFoundError, match="nor any other"):
        make(slow, tmp_path).remove(3)


@near_and_far
def test_files_of_others_stay(slow: Slow, tmp_path: Path) -> None:
    others = [
        "model.pt",
        "model.pt.json",
        "step-1.txt",
        "step-00000001.json",
        "xstep-00000001.pt.json",
        "step-00000001.0123456789abcdef-0.rank-0-of-2.pt",
        "step-00000001.0123456789abcdef-0.rank-0-of-2.pt.json",
    ]
    (tmp_path / "fast").mkdir()
    if slow.fs is None:
        slow.place.mkdir()
    for name in others:
        (tmp_path / "fast" / name).write_text("{}")
        slow.write(name, b"{}")
    (tmp_path / "fast" / (name_of(7) + MANIFEST)).write_text("{}")  # of a file that is gone
    with make(slow, tmp_path, keep=1) as run:
        for step in (1, 2, 3):
            save(run, step)
            run.wait()
    assert fast_names(tmp_path) == sorted([*others, *with_manifests(3)])
    assert slow.names() == sorted([*others, *with_manifests(3)])


def test_several_objects_in_the_same_directories(slow: Slow, tmp_path: Path) -> None:
    runs = [make(slow, tmp_path, keep=4) for _ in range(2)]
    for step in range(1, 9):
        save(runs[step % 2], step)
        runs[step % 2].wait()
    for run in runs:
        run.close()
    for run in runs:
        assert run.steps() == [5, 6, 7, 8]
        assert restored(run) == (8, 8)
    assert fast_names(tmp_path) == slow.names() == with_manifests(5, 6, 7, 8)


# ------------------------------------------------------------------------------------- options


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"keep": 0}, ValueError, r"keep\['local'\] must be at least 1, not 0"),
    ({"keep": True}, TypeError, r"keep\['local'\] must be an int, not True"),
    ({"keep": "3"}, TypeError, "must be an int, not str"),
    ({"keep": {"local": 0}}, ValueError, "at least 1"),
    ({"keep": {"remote": -1}}, ValueError, "at least 1"),
    ({"keep": {"peers": 2}}, TypeError, "keep must be a dict with keys"),
    ({"keep": {1: 2}}, TypeError, "keep must be a dict with keys"),
    ({"every": 2}, TypeError, "every must be a dict with keys"),
    ({"every": {"slow": 2}}, TypeError, "every must be a dict with keys"),
    ({"every": {"remote": 0}}, ValueError, "at least 1"),
    ({"every": {"remote": None}}, TypeError, "must be an int, not NoneType"),
    ({"every": {"remote": 1.5}}, TypeError, "must be an int, not float"),
    ({"every": {"local": 2}}, ValueError, "each step is saved to the local directory"),
    ({"peers": -1}, ValueError, "peers must be at least 0, not -1"),
    ({"peers": True}, TypeError, "peers must be an int, not True"),
    ({"peers": 1}, TypeError, "peers is for several ranks"),
    ({"keep": {"remote": None}, "keep_every": 2}, ValueError, "keep=None keeps all"),
    ({"local": "s3://bucket/fast"}, ValueError, "s3://bucket/fast"),
    ({"local": "file:///tmp/fast"}, ValueError, "file:///tmp/fast"),
    ({"local": "s3:/bucket/fast"}, ValueError, "s3:/"),
    ({"local": 5}, TypeError, "int"),
    ({"local": None, "every": {"remote": 2}}, TypeError, "need local"),
    ({"local": None, "peers": 1}, TypeError, "need local"),
    ({"local": None, "keep": {"local": 2}}, TypeError, "keep must be an int"),
]


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_refused_options(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        ptsave.AsyncCheckpointer(tmp_path / "slow", **{"local": tmp_path / "fast", **options})
    assert not (tmp_path / "fast").exists() or os.listdir(tmp_path / "fast") == []


def test_the_only_rank_restores_from_its_local_directory(slow: Slow, tmp_path: Path) -> None:
    with make(slow, tmp_path, rank=0, world_size=1, every={"remote": 2}) as run:
        save(run, 2)
        save(run, 3)
        run.wait()
        assert (run.steps(), run.protected()) == ([2, 3], 2)
        assert restored(run) == (3, 3)
    with make(slow, tmp_path, rank=0) as run:  # perhaps another process cannot see this directory
        assert run.steps() == [2]


def test_options_may_be_numbers_of_numpy(slow: Slow, tmp_path: Path) -> None:
    two = pytest.importorskip("numpy").int64(2)
    with make(slow, tmp_path, keep={"local": two}, every={"remote": two}, peers=two - 2) as run:
        for step in (1, 2, 3):
            save(run, step)
    assert fast_names(tmp_path) == with_manifests(2, 3)
    assert slow.names() == with_manifests(2)


@pytest.mark.parametrize("domain", ["/rack/1", "s3://rack/1"])
def test_a_failure_domain_that_looks_like_a_slow_place(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: str
) -> None:
    monkeypatch.setenv("PTSAVE_FAILURE_DOMAIN", domain)
    with pytest.raises(ValueError, match="PTSAVE_FAILURE_DOMAIN must not be a path or URL"):
        make(slow, tmp_path)


@pytest.mark.parametrize("kind", ["same", "relative", "link", "below a link", "URL"])
def test_one_directory_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "a" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    places: dict[str, tuple[Any, Any]] = {
        "same": (tmp_path / "a", tmp_path / "a"),
        "relative": ("a", f"{tmp_path}/a/"),
        "link": ("link", "a"),
        "below a link": ("link/run", "link/run"),
        "URL": (f"file://{tmp_path}/a", "a"),
    }
    directory, local = places[kind]
    with pytest.raises(ValueError, match="must be different directories"):
        ptsave.AsyncCheckpointer(directory, local=local)


@needs_root
def test_one_directory_that_is_mounted_twice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    same = pytest.raises(ValueError, match="must be different directories")
    with mounted(tmp_path / "b", "--bind", tmp_path / "a"), same:
        ptsave.AsyncCheckpointer(tmp_path / "a", local=tmp_path / "b")


def test_a_local_directory_that_cannot_be(slow: Slow, tmp_path: Path) -> None:
    (tmp_path / "fast").write_text("")
    with pytest.raises(ptsave.SaveError, match="is a file"):
        make(slow, tmp_path)
    with pytest.raises(ptsave.SaveError, match="is a file"):
        ptsave.AsyncCheckpointer(slow.place, local=tmp_path / "fast/x", storage_options=TOKEN)
    with pytest.raises(TypeError, match="needs local"):
        ptsave.AsyncCheckpointer(tmp_path / "slow").protected()


# -------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("method", ["open", "write", "mv"])
@pytest.mark.parametrize("is_os_error", [True, False])
def test_the_slow_place_fails(slow: Slow, tmp_path: Path, method: str, is_os_error: bool) -> None:
    """The save itself succeeds.  `wait` raises once, or one warning tells of it."""
    error = ConnectionError("gone") if is_os_error else ZeroDivisionError("gone")
    run = make(slow, tmp_path)
    save(run, 1)
    run.wait()
    with failing(method, error):
        save(run, 2)
        with pytest.raises(ptsave.SaveError, match=r"step-00000002\.pt was saved, but a copy") as e:
            run.wait()
        assert "gone" in str(e.value)
        run.wait()
        with warned() as texts:
            run.save(3, x=value(3), step=3, on_error="warn").result()
            run.wait()
        assert ["step-00000003.pt was saved, but a copy was not" in text for text in texts] == [
            True
        ]
    assert run.steps() == [1, 2, 3]
    assert run.protected() == 1
    assert restored(run) == (3, 3)
    save(run, 4)
    run.close()
    assert run.protected() == 4
    assert slow.names() == with_manifests(1, 4)


def test_the_slow_place_cannot_be_listed(slow: Slow, tmp_path: Path) -> None:
    run = make(slow, tmp_path)
    for step in (1, 2):
        save(run, step)
    run.wait()
    with failing("ls", ConnectionError("gone")):
        for options in ({}, {"fallback": True}):
            with warned() as texts:
                assert restored(run, **options) == (2, 2)
            assert ["the checkpoints cannot be listed" in text for text in texts] == [True]
        damage_fast(tmp_path, 2)
        with warned() as texts:
            assert restored(run, fallback=True) == (1, 1)
        assert len([text for text in texts if "step 1 is restored" in text]) == 1
        save(run, 3)
        with pytest.raises(ptsave.SaveError, match="gone"):
            run.wait()
    run.close()
    assert restored(run) == (3, 3)


def test_errors_of_any_type_reach_wait(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (MemoryError("none left"), ImportError("no library"), RuntimeError("other")):
        for name in ("digest_of", "write_copy"):
            run = make(slow, tmp_path)
            with monkeypatch.context() as patch:

                def fail(*_: Any, error: Exception = error, **__: Any) -> None:
                    raise error

                patch.setattr(tiers, name, fail)
                save(run, 1)
                with pytest.raises(ptsave.SaveError, match=str(error)):
                    run.wait()
            run.close()


def test_the_local_directory_vanishes(slow: Slow, tmp_path: Path) -> None:
    run = make(slow, tmp_path)
    save(run, 1)
    run.wait()
    shutil.rmtree(tmp_path / "fast")
    with pytest.raises(OSError, match="No such file"):
        save(run, 2)
    assert restored(run, 1) == (1, 1)
    with warned() as texts:
        assert isinstance(run.save(3, x=value(3), on_error="warn").exception(), OSError)
        run.wait()
    assert ["step 3 was not saved" in text for text in texts] == [True]
    (tmp_path / "fast").mkdir()
    save(run, 4)
    run.close()
    assert run.steps() == [1, 4]
    assert slow.names() == with_manifests(1, 4)


@needs_root
def test_full_disks(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "slow")
    slow.place.mkdir()
    (tmp_path / "fast").mkdir()
    size = ("-t", "tmpfs", "-o", "size=100k", "none")
    with mounted(slow.place, *size):
        run = make(slow, tmp_path)
        save(run, 1)
        run.save(2, x=torch.zeros(100_000)).result()
        with pytest.raises(ptsave.SaveError, match=r"a copy was not.*No space left") as caught:
            run.wait()
        assert caught.value.errno == errno.ENOSPC
        assert slow.names() == with_manifests(1)
        assert [name for name in os.listdir(slow.place) if name.endswith(".ptsave")] == []
        save(run, 3)
        run.close()
        assert slow.names() == with_manifests(1, 3)
        assert run.steps() == [1, 2, 3]


@needs_root
def test_a_full_local_disk(slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that have no room here are restored from the URL."""
    with make(slow, tmp_path) as run:
        run.save(1, x=torch.ones(100_000)).result()
    shutil.rmtree(tmp_path / "fast")
    (tmp_path / "fast").mkdir()
    with mounted(tmp_path / "fast", "-t", "tmpfs", "-o", "size=100k", "none"):
        with make(slow, tmp_path) as run:
            assert torch.equal(run.restore()["x"], torch.ones(100_000))
            assert fast_names(tmp_path) == []
            with monkeypatch.context() as patch:  # there was room before other ranks took it
                patch.setattr(LocalFolder, "check_room", lambda *_: None)
                assert torch.equal(run.restore()["x"], torch.ones(100_000))
            assert fast_names(tmp_path) == []
            with pytest.raises(OSError, match="No space left"):
                run.save(2, x=torch.zeros(100_000)).result()
            save(run, 3)
        assert fast_names(tmp_path) == with_manifests(3)


class Brake:
    """Lets copies to the slow place wait for `released`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, self.reached = threading.Event(), threading.Event()
        write_copy: Any = vars(tiers)["write_copy"]

        def braked(*arguments: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.released.wait(60)
            return write_copy(*arguments, **options)

        monkeypatch.setattr(tiers, "write_copy", braked)


@pytest.mark.parametrize("fallback", [False, True])
def test_another_process_removes_the_step_that_is_restored(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    """The newer step is taken, and nothing warns: the step is not damaged."""
    with make(slow, tmp_path, keep=1, every={"remote": 9}) as run:
        save(run, 1)
        reader, candidate = make(slow, tmp_path, every={"remote": 9}), tiers.Tiers.candidate

        def late(self: Any, key: Any, stack: Any) -> Any:
            if key[0] == 1:
                save(run, 2)
                run.wait()
            return candidate(self, key, stack)

        monkeypatch.setattr(tiers.Tiers, "candidate", late)
        with warned() as texts:
            assert restored(reader, fallback=fallback) == (2, 2)
        assert texts == []


def test_uploads_slower_than_the_run(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brake = Brake(monkeypatch)
    run = make(slow, tmp_path, keep=2)
    save(run, 1)
    assert brake.reached.wait(60)
    with warned() as texts:
        for step in range(2, 9):
            save(run, step)
        eventually(lambda: fast_names(tmp_path) == with_manifests(7, 8), 60)
        assert run.protected() is None
        brake.released.set()
        run.close()
    assert [text.partition("step ")[2][0] for text in texts] == ["2", "3", "4", "5", "6"]
    assert all("is not copied there, because later steps wait" in text for text in texts)
    assert slow.names() == with_manifests(7, 8)
    assert fast_names(tmp_path) == with_manifests(7, 8)


def test_old_steps_go_while_they_are_copied(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that is removed is copied to its end."""
    brake = Brake(monkeypatch)
    run = make(slow, tmp_path, keep={"local": 1, "remote": 9})
    for step in (1, 2):
        save(run, step)
    eventually(lambda: fast_names(tmp_path) == with_manifests(2), 60)
    brake.released.set()
    run.close()
    assert slow.names() == with_manifests(1, 2)
    assert fast_names(tmp_path) == with_manifests(2)  # no manifest of step 1
    assert restored(run, 1) == (1, 1)


def test_a_step_that_is_removed_meanwhile(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that finds the local copy gone takes another one."""
    with make(slow, tmp_path) as run:
        for step in (1, 2):
            save(run, step)
    opened = tiers.Tiers.opened

    def removing(self: Any, holder: Any, stack: Any) -> Any:
        if holder.kind == "local":
            (tmp_path / "fast" / name_of(2)).unlink(missing_ok=True)
        return opened(self, holder, stack)

    monkeypatch.setattr(tiers.Tiers, "opened", removing)
    with warned() as texts:
        assert restored(run) == (2, 2)
    assert ["No such file" in text for text in texts] == [True]


# -------------------------------------------------------------------------------- forks and exits

PROGRAM = """
import os, sys, threading, time, warnings
import torch, ptsave
from ptsave.training import tiers
fast, slow, kind, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
write_copy = tiers.write_copy
def late(*arguments, **more):
    time.sleep(0.3)
    return write_copy(*arguments, **more)
tiers.write_copy = late
run = ptsave.AsyncCheckpointer(slow, local=fast, storage_options=options)
def save(step):
    return run.save(step, x={"w": torch.full((300,), float(step))}, step=step)
save(1)
"""
ENDS = {
    "exit": "save(2)",
    "error": "save(2); raise SystemExit(0)",
    "fork": """
save(2).result()
pid = os.fork()
if pid == 0:
    assert run.steps() in ([1], [1, 2]), run.steps()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
save(3)
run.close()
""",
    "fork that saves": """
save(2).result()
pid = os.fork()
if pid == 0:
    save(3).result()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
run.close()
assert run.steps() == [1, 2, 3]
""",
    "at exit": """
import atexit
atexit.register(lambda: save(2))
""",
}


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("slow", ["directory", "s3"], indirect=True)
def test_copies_are_completed(slow: Slow, tmp_path: Path, kind: str) -> None:
    program = PROGRAM + ENDS[kind]
    arguments = [tmp_path / "fast", slow.place, kind, repr(slow.options)]
    result = run_warm(program, *arguments, timeout=60)
    assert result.stderr == ""
    steps = (1, 2, 3) if "fork" in kind else (1, 2)
    assert fast_names(tmp_path) == with_manifests(*steps)
    assert slow.names() == with_manifests(*steps)


def test_copies_that_fail_at_exit(tmp_path: Path) -> None:
    program = PROGRAM + "\nimport shutil; shutil.rmtree(slow)\nopen(slow, 'w').close()\n"
    result = run_warm(program, tmp_path / "fast", tmp_path / "slow", "", "None", timeout=60)
    assert "was saved, but a copy was not" in result.stderr
    assert "CheckpointWarning" in result.stderr


def test_models_and_options(slow: Slow, tmp_path: Path) -> None:
    """Options of saves and restores are the same as without tiers."""
    model = nn.Linear(20, 20)
    with make(slow, tmp_path, fsync=False, staging="background") as run:
        run.save(1, model=model, note="a", fsync=True, progress=False).wait_staged()
        run.wait()
        assert stock_load(tmp_path / "fast" / name_of(1))["note"] == "a"
        shutil.rmtree(tmp_path / "fast")
        target = nn.Linear(20, 20)
        assert run.restore(model=target, strict=True) == {"note": "a"}
        assert torch.equal(target.weight, model.weight)
        with pytest.raises(RuntimeError, match="size mismatch"):
            run.restore(model=nn.Linear(3, 3))
        with pytest.raises(KeyError, match="other"):
            run.restore(other=model)
        with pytest.raises(ValueError, match="fallback=True chooses the step"):
            run.restore(1, fallback=True)


def test_manifests_that_appear_during_a_listing(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may have the manifest of a new file, but not the file: then both stay."""
    run = make(slow, tmp_path)
    save(run, 1)
    run.wait()
    folder = run._directory.folder
    regular_files, hidden = folder.regular_files, [name_of(1)]

    def listed() -> list[str]:
        found = [name for name in regular_files() if name not in hidden]
        hidden.clear()
        return found

    monkeypatch.setattr(folder, "regular_files", listed)
    run._directory.remove_leftovers()
    assert fast_names(tmp_path) == with_manifests(1)
    monkeypatch.undo()
    run.close()


def test_an_older_copy_ends_when_training_has_gone_back(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prunes while the file of a lower step is there, but is not yet open to be copied."""
    run = make(slow, tmp_path, keep=1)
    save(run, 9)
    run.wait()
    saved = tiers.Tiers.saved

    def late(self: Any, *arguments: Any, **options: Any) -> None:
        self._prune_local()
        saved(self, *arguments, **options)

    monkeypatch.setattr(tiers.Tiers, "saved", late)
    with pytest.warns(ptsave.CheckpointWarning, match="step 9 is there"):
        save(run, 3)
    run.close()
    assert fast_names(tmp_path) == with_manifests(3, 9)
