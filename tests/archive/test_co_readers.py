"""Processes that load one file at the same time fetch it from the disk once, all together."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _system import run_python
from safetensors.torch import save_file

import ptsave
from ptsave.bench.system import cached_fraction, make_cold

N_RANKS = 3
STATE = {f"layer{i}.weight": (1 << 20,) for i in range(24)}  # 96 MiB, thrice the shared start

# Ranks are forks of a process that has imported everything; they begin when the pipe is closed.
RANKS = """
import json, os, sys
import torch, ptsave

what, path, n_ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)

def load():
    if what == "load":
        return ptsave.load(path)
    state = {f"layer{i}.weight": torch.zeros(1 << 20) for i in range(24)}
    if what == "load_into":
        ptsave.load_into(path, state)
        return state
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Module() for i in range(24)})
    for i in range(24):
        model[f"layer{i}"].weight = torch.nn.Parameter(state[f"layer{i}.weight"])
    ptsave.load_model(model, path)
    return model.state_dict()

def read_nbytes():
    with open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("read_bytes"))

begin, begun = os.pipe()
results, reported = os.pipe()
children = []
for rank in range(n_ranks):
    children.append(os.fork())
    if children[-1] == 0:
        os.close(begun)
        os.read(begin, 1)
        before = read_nbytes()
        values = {float(tensor.detach().view(-1)[-1]) for tensor in load().values()}
        assert values == {float(i) for i in range(24)}, values
        os.write(reported, f"{read_nbytes() - before}\\n".encode())
        os._exit(0)
os.close(begun)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
os.close(reported)
with open(results) as stream:
    print(json.dumps([codes, [int(line) for line in stream]]))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file on a disk whose reads past the page cache are counted."""
    path = tmp_path_factory.mktemp("read together") / "model.pt"
    torch.save(_state(), path)
    try:
        make_cold(path)
    except RuntimeError as error:
        pytest.skip(str(error))
    if not Path("/proc/self/io").exists():
        pytest.skip("the kernel does not count what is read")
    if not _goes_past_the_page_cache(path, _load_in_process):
        pytest.skip("the file system has no direct reads")
    return path


def _goes_past_the_page_cache(path: Path, operation: Callable[[Path], None]) -> bool:
    """Whether an operation on a cold file leaves most of it cold; it is cold afterwards."""
    for _ in range(3):  # the kernel may bring more than it is asked for
        make_cold(path)
        operation(path)
        fraction = cached_fraction(path)
        make_cold(path)
        if fraction < 0.5:
            return True
    return False


def _state() -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(STATE.items())}


def _load_in_process(path: Path) -> None:
    for i, tensor in enumerate(ptsave.load(path).values()):
        assert tensor[-1] == i


def _nbytes_read(what: str, path: Path, **environment: str) -> list[int]:
    """Return what each rank has had read from the disk."""
    done = run_python(RANKS, what, path, N_RANKS, env={**os.environ, **environment})
    codes, counts = json.loads(done.stdout)
    assert codes == [0] * N_RANKS, done.stderr
    return list(counts)


def _nbytes_refaulted() -> int:
    """Return how many bytes of files the kernel has had to read again since it started."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["workingset_refault_file"]) * mmap.PAGESIZE


@pytest.mark.parametrize("what", ["load", "load_into", "load_model"])
def test_ranks_of_one_machine_read_a_file_once(archive: Path, what: str) -> None:
    if what == "load_model":
        archive = archive.with_suffix(".safetensors")
        save_file(_state(), archive)
    # A virtual machine may give pages of the cache back (DAMON) before the last rank is there.
    for _ in range(3):
        make_cold(archive)
        before = _nbytes_refaulted()
        counts = _nbytes_read(what, archive, LOCAL_WORLD_SIZE=str(N_RANKS))
        again = max(0, sum(counts) - archive.stat().st_size)
        if again == 0 or _nbytes_refaulted() - before < again:
            break
    assert 0.95 < sum(counts) / archive.stat().st_size < 1.05, counts


def test_the_only_reader_goes_past_the_page_cache(archive: Path) -> None:
    assert _goes_past_the_page_cache(archive, _load_in_process)


@pytest.mark.parametrize(
    ("variable", "value", "is_cached"),
    [
        ("PTSAVE_DIRECT_IO", "0", True),
        ("LOCAL_WORLD_SIZE", "2", True),
        ("LOCAL_WORLD_SIZE", "1", False),
    ],
)
def test_the_environment_decides(
    archive: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_cached: bool
) -> None:
    monkeypatch.setenv(variable, value)
    assert _goes_past_the_page_cache(archive, _load_in_process) is not is_cached


def _load_into(path: Path) -> None:
    ptsave.load_into(path, {name: torch.zeros(shape) for name, shape in STATE.items()})


def _verify(path: Path) -> None:
    with ptsave.open(path) as opened:
        opened.verify()


@pytest.mark.parametrize("operation", [_load_in_process, _load_into, _verify])
def test_whoever_else_reads_the_file_is_noticed(
    archive: Path, operation: Callable[[Path], None]
) -> None:
    # Readers without a LOCAL_WORLD_SIZE: two jobs, or workers that somebody has started by hand.
    with ptsave.open(archive) as other:
        other.get_tensor("layer0.weight")
        operation(archive)
        assert cached_fraction(archive) > 0.9
    assert _goes_past_the_page_cache(archive, operation)


def test_nobody_who_saves_waits_for_readers(archive: Path) -> None:
    with ptsave.open(archive) as reader:
        reader.get_tensor("layer0.weight")
        ptsave.save(_state(), archive, atomic=False)
    _load_in_process(archive)


def test_damage_is_seen_by_every_rank(archive: Path, tmp_path: Path) -> None:
    archive = Path(shutil.copy(archive, tmp_path))
    with archive.open("r+b") as stream:
        stream.seek(50 << 20)
        byte = stream.read(1)
        stream.seek(50 << 20)
        stream.write(bytes([byte[0] ^ 1]))
    make_cold(archive)
    with pytest.raises(AssertionError, match="CorruptCheckpointError"):
        _nbytes_read("load", archive, LOCAL_WORLD_SIZE="3")
