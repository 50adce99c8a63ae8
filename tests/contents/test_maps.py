"""Maps that are verified: in the background, at hand-out, and once per host."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from warm_python import WarmProcess

import ptsave

Doubt = Callable[[Path], Any]


@pytest.fixture(autouse=True)
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the test remember verdicts in a directory of its own."""
    folder = tmp_path / "verdicts"
    monkeypatch.setenv("PTSAVE_VERDICTS", str(folder))
    return folder


@pytest.fixture(params=["pt", "safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a file whose times are old enough for a verdict."""
    path = tmp_path / f"model.{request.param}"
    state = {f"w{i}": torch.randn(3000 + i) for i in range(6)}
    if path.suffix == ".pt":
        torch.save({**state, "tied": state["w2"][10:20], "step": 7}, path)
    else:
        ptsave.save_model({**state, "empty": torch.empty(0)}, path)
    time.sleep(0.12)
    return path


def stock_load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path) if path.suffix == ".pt" else load_file(path)
    return state


def rewrite(path: Path) -> None:
    """Write the values of a file again, with the checksums that they have now."""
    state = stock_load(path)
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        ptsave.save_model(state, path)


def in_background(path: Path) -> Any:
    state = ptsave.load(path, mmap=True, verify="background")
    ptsave.verified(state)
    return state


def by_open(path: Path) -> Any:
    with ptsave.open(path, map=True) as archive:
        others = {"step": archive["step"]} if path.suffix == ".pt" else {}
        return {**archive.tensors(), **others}


DOORS = pytest.mark.parametrize("door", [in_background, by_open, ptsave.share])


def flip(path: Path, name: str) -> None:
    """Change one random bit of a tensor's record, in place."""
    with ptsave.open(path) as archive:
        info = archive.info(name)
    assert info.offset is not None
    with path.open("r+b") as file:
        file.seek(info.offset + random.randrange(info.nbytes))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))


def n_remembered(folder: Path) -> int:
    return sum(1 for each in folder.iterdir() if each.stat().st_size)


@DOORS
def test_values_are_those_of_the_stock_library(path: Path, door: Doubt) -> None:
    stock = stock_load(path)
    found = door(path)
    assert found.keys() == stock.keys()
    for name in stock:
        torch.testing.assert_close(found[name], stock[name], rtol=0, atol=0)


@DOORS
@pytest.mark.parametrize("number", range(6))
@pytest.mark.filterwarnings("ignore:a mapped file")
def test_each_record_is_compared(path: Path, door: Doubt, number: int, verdicts: Path) -> None:
    in_background(path)  # the verdict about the undamaged file must not be used
    for _ in range(4):
        flip(path, f"w{number}")
        with pytest.raises(ptsave.CorruptCheckpointError) as caught:
            door(path)
        tied = ["tied"] * (number == 2 and path.suffix == ".pt")
        assert caught.value.entries == [f"w{number}", *tied]
        assert n_remembered(verdicts) == 1
        rewrite(path)
        time.sleep(0.12)
        door(path)
        assert n_remembered(verdicts) >= 1
        for each in verdicts.iterdir():
            each.unlink()
        in_background(path)


def test_a_handed_out_record_is_compared_alone(path: Path) -> None:
    flip(path, "w1")
    with ptsave.open(path, map=True) as archive:
        archive.get_tensor("w0")
        archive.get_tensor("w1", verify=False)
        with pytest.raises(ptsave.CorruptCheckpointError):
            archive.get_tensor("w1")
        with pytest.raises(ptsave.CorruptCheckpointError):
            ptsave.verified(archive)
        with ptsave.open(path) as unmapped:
            assert archive.infos() == unmapped.infos()


def test_a_written_map_is_no_damage(path: Path) -> None:
    """The file is whole, although the program has changed its own copy of a page."""
    with ptsave.open(path, map=True) as archive:
        archive.get_tensor("w1", verify=False).zero_()
        assert not archive.get_tensor("w1").count_nonzero()
        ptsave.verified(archive)
    assert stock_load(path)["w1"].count_nonzero()


def test_damage_warns_once_if_nobody_waits(path: Path) -> None:
    flip(path, "w3")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = ptsave.load(path, mmap=True, verify="background")
        while not caught:
            time.sleep(0.01)
    (warning,) = caught
    assert warning.category is ptsave.CheckpointWarning
    assert "w3" in str(warning.message)
    for _ in range(2):
        with pytest.raises(ptsave.CorruptCheckpointError):
            ptsave.verified(state["w0"])


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_only_is_passed_on(tmp_path: Path, weights_only: bool) -> None:
    torch.save({"a": torch.ones(3), "path": Path("x")}, tmp_path / "a.pt")
    for load in (ptsave.share, torch.load):
        if weights_only:
            with pytest.raises(Exception, match="Weights only load failed"):
                load(tmp_path / "a.pt", weights_only=True)
        else:
            assert load(tmp_path / "a.pt", weights_only=False)["path"] == Path("x")


def test_a_replaced_file_is_checked_by_its_map(path: Path) -> None:
    state = ptsave.load(path, mmap=True, verify="background")
    other = {"other": torch.ones(1 << 20)}
    (ptsave.save if path.suffix == ".pt" else ptsave.save_model)(other, path)
    flip(path, "other")
    ptsave.verified(state)


def test_a_truncated_file_is_an_error(path: Path) -> None:
    archive = ptsave.open(path, map=True)
    os.truncate(path, 5000)
    with pytest.raises((OSError, ptsave.CorruptCheckpointError)):
        ptsave.verified(archive)


def test_threads_share_a_check(path: Path) -> None:
    states = [ptsave.load(path, mmap=True, verify="background") for _ in range(4)]
    threads = [Thread(target=ptsave.verified, args=(states,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ptsave.verified(states)


@pytest.mark.parametrize("change", ["touch", "rewrite", "replace"])
def test_a_changed_file_has_no_verdict(path: Path, verdicts: Path, change: str) -> None:
    in_background(path)
    assert n_remembered(verdicts) == 1
    if change == "touch":
        os.utime(path)
    elif change == "rewrite":
        path.write_bytes(path.read_bytes())
    else:
        rewrite(path)
    time.sleep(0.12)
    ptsave.share(path)
    assert n_remembered(verdicts) == 2


def test_a_fresh_file_is_not_remembered(tmp_path: Path, verdicts: Path) -> None:
    ptsave.save(torch.ones(9), tmp_path / "new.pt")
    ptsave.share(tmp_path / "new.pt")
    assert n_remembered(verdicts) == 0


@pytest.mark.parametrize("content", [b"", b"whole", b"\xff" * 200, None])
@pytest.mark.filterwarnings("ignore:a mapped file")
def test_a_hostile_verdict_is_ignored(path: Path, verdicts: Path, content: bytes | None) -> None:
    in_background(path)
    (verdict,) = verdicts.iterdir()
    stamp = path.stat()
    flip(path, "w4")
    with pytest.raises(ptsave.CorruptCheckpointError):
        in_background(path)
    for each in verdicts.iterdir():
        text = verdict.read_bytes() if content is None else content
        if each != verdict:
            each.write_bytes(text)  # the verdict about another file, or garbage
    assert path.stat().st_size == stamp.st_size
    with pytest.raises(ptsave.CorruptCheckpointError):
        in_background(path)


@pytest.mark.parametrize("fault", ["shared", "file", "link", "off"])
def test_a_foreign_directory_remembers_nothing(
    path: Path, verdicts: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "shared":
        verdicts.mkdir(mode=0o777)
        verdicts.chmod(0o777)
    elif fault == "file":
        verdicts.write_bytes(b"")
    elif fault == "link":
        (path.parent / "real").mkdir(mode=0o700)
        verdicts.symlink_to(path.parent / "real")
    else:
        monkeypatch.setenv("PTSAVE_VERDICTS", "0")
    ptsave.share(path)
    in_background(path)
    assert not verdicts.is_dir() or not list(verdicts.iterdir())


def test_a_child_checks_for_itself(path: Path) -> None:
    state = ptsave.load(path, mmap=True, verify="background")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            ptsave.verified(state, timeout=30)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    ptsave.verified(state)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_exit_ends_a_check(tmp_path: Path, name: str) -> None:
    """A check that waits for another process's lock, and so would never end, ends at exit."""
    code = """
import fcntl, glob, subprocess, sys, time
import ptsave
path, folder = sys.argv[1:]
ptsave.share(path)
(verdict,) = glob.glob(folder + "/*")
with open(verdict, "r+b") as file:
    file.truncate(0)
    fcntl.flock(file, fcntl.LOCK_EX)
    state = ptsave.load(path, mmap=True, verify="background")
    try:
        ptsave.verified(state, timeout=0.2)
    except TimeoutError:
        print("waits")
    sys.exit(0)
"""
    if sys.version_info < (3, 11):
        code = code.replace("except TimeoutError", "except Exception")
    (ptsave.save if name == "a.pt" else ptsave.save_model)({"a": torch.ones(1000)}, tmp_path / name)
    time.sleep(0.12)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / name, tmp_path / "verdicts"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"waits\n", b"")
    assert time.monotonic() - begin < 30


REFUSED: dict[str, Callable[[Path], Any]] = {
    "no map": lambda p: ptsave.load(p, verify="background"),
    "mmap=False": lambda p: ptsave.load(p, mmap=False, verify="background"),
    "a file object": lambda p: ptsave.load(p.open("rb"), mmap=True, verify="background"),
    "a URL": lambda p: ptsave.load(f"memory://{p}", mmap=True, verify="background"),
    "meta": lambda p: ptsave.load(p, "meta", mmap=True, verify="background"),
    "an accelerator": lambda p: ptsave.load(p, "cuda", mmap=True, verify="background"),
    "load_into": lambda p: ptsave.load_into(p, {}, verify="background"),  # type: ignore[arg-type]
    "share a URL": lambda p: ptsave.share(f"memory://{p}"),
    "open a URL": lambda p: ptsave.open(f"memory://{p}", map=True),
    "open a file object": lambda p: ptsave.open(p.open("rb"), map=True),
    "recover": lambda p: ptsave.open(p, map=True, recover=True),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_refused(path: Path, case: str) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe(f"{path}", path.read_bytes())
    with pytest.raises(ValueError):
        REFUSED[case](path)


@DOORS
def test_legacy_files_are_refused(tmp_path: Path, door: Doubt) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ptsave.UnsupportedSourceError):
        door(tmp_path / "a.pt")


@DOORS
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_missing_file(tmp_path: Path, door: Doubt, name: str) -> None:
    with pytest.raises(FileNotFoundError):
        door(tmp_path / name)


def test_safetensors_without_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checksums there is nothing to verify; without `verify` there need not be any."""
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.ones(3)}
    save_file(tensors, path)
    with ptsave.open(path, map=True) as file:
        assert torch.equal(file["a"], tensors["a"])
        with pytest.raises(ValueError, match="no checksums"):
            file.verify()
    for door in (ptsave.share, in_background):
        with pytest.raises(ValueError, match="no checksums"):
            door(path)
    monkeypatch.setenv("PTSAVE_VERIFY", "0")
    assert torch.equal(ptsave.share(path)["a"], tensors["a"])


def test_tensors_that_no_map_can_hold(tmp_path: Path) -> None:
    """A file whose header has an odd length is legal, but its tensors are not aligned."""
    path = tmp_path / "a.safetensors"
    ptsave.save_model({"a": torch.arange(3.0)}, path)
    data = path.read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")] + b" "
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[-12:])
    assert torch.equal(ptsave.load(path, mmap=True)["a"], torch.arange(3.0))
    with ptsave.open(path, map=True) as archive:
        assert torch.equal(archive["a"], torch.arange(3.0))  # a copy
    for door in (in_background, ptsave.share):
        with pytest.raises(ValueError, match=r"a at offset \d+ cannot be mapped"):
            door(path)


def test_shards_are_checked_together(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((5000,), float(i)) for i in range(8)}
    ptsave.save_model(tensors, tmp_path, max_shard_size=50_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    for door in (in_background, ptsave.share):
        found = door(tmp_path)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    flip(shards[1], next(iter(load_file(shards[1]))))
    with ptsave.open(tmp_path, map=True) as archive, pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.verified(archive)
    with pytest.raises(ptsave.CorruptCheckpointError, match=re.escape(shards[1].name)):
        ptsave.share(tmp_path)


PSS = """
import os, re, sys
import ptsave
state = ptsave.share(sys.argv[1])
state["w"].sum()
print(flush=True)
sys.stdin.readline()
text = open("/proc/self/smaps").read()
parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
print(sum(int(re.search(r"Pss: +(\\d+)", p)[1]) for p in parts if sys.argv[1] in p), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("name", ["big.pt", "big.safetensors"])
def test_processes_share_one_copy(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    (ptsave.save_model if path.suffix != ".pt" else ptsave.save)({"w": torch.zeros(8 << 20)}, path)
    ranks = [
        WarmProcess(PSS, path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(8)
    ]
    total = 0
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "\n"
    for rank in ranks:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        total += int(rank.stdout.readline()) << 10
    for rank in ranks:
        rank.communicate()
    assert path.stat().st_size * 0.9 < total <= 1.05 * path.stat().st_size


def test_verified_of_modules_and_of_objects_without_tensors(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 3)
    torch.save(module.state_dict(), tmp_path / "a.pt")
    torch.save([1], tmp_path / "b.pt")
    state = ptsave.load(tmp_path / "a.pt", mmap=True, verify="background")
    module.load_state_dict(state, assign=True)
    ptsave.verified(module)
    ptsave.verified(ptsave.load(tmp_path / "b.pt", mmap=True, verify="background"))
    with pytest.raises(ValueError, match="no tensor in a mapped file"):
        ptsave.verified(torch.nn.Linear(3, 3))
