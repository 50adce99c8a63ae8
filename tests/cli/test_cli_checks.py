"""`verify` finds all damage and names what has changed; `globals` says what torch says."""

from __future__ import annotations

import collections
import datetime
import fractions
import json
import os
import pickle
import random
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from _corruption import flip, offset_of
from command_line import fail, run
from reports import verify_directory
from safetensors.torch import save_file
from stock_comparison import Calls, deflated, save_without_checksums, stock_load
from torch import Tensor

import ptsave
from ptsave.inspection.pickle_globals import code_to_allow, required_globals, unsafe_globals
from ptsave.inspection.verification import verify_file

N_TENSORS = 12


def tensors() -> dict[str, Tensor]:
    made = {f"layer.{i}": torch.full((100 + i,), float(i)) for i in range(N_TENSORS)}
    made["tied"] = made["layer.3"]
    return made


verify = partial(run, "verify")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(tensors(), tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def test_whole(path: Path) -> None:
    result = verify(path)
    n_records = len(zipfile.ZipFile(path).namelist())
    facts = f"{n_records} records, {N_TENSORS + 1} tensors, "
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{path}: whole ({facts}")


def test_all_damage_is_named(path: Path) -> None:
    flip(path, *(offset_of(path, f"layer.{i}") for i in (2, 3, 7)))
    found = verify_file(path)
    with ptsave.open(path, verify=False) as archive:
        changed = [n for n, t in tensors().items() if not torch.equal(archive.get_tensor(n), t)]
    assert [name for problem in found.problems for name in problem.entries] == [
        "layer.2",
        "layer.3",
        "tied",
        "layer.7",
    ]
    assert sorted(changed) == sorted(n for problem in found.problems for n in problem.entries)
    assert found.whole == [name for name in tensors() if name not in changed]
    result = verify(path)
    assert result.exit_code == 1
    assert result.stdout.count("its CRC-32 is") == 3
    assert "9 of 13 tensors can be read" in result.stdout
    assert "damaged: tied" in result.stdout
    assert "whole:" not in result.stdout
    assert verify("--list", path).stdout.count("whole:") == 9


def test_a_flip_of_any_byte_that_is_checked(path: Path) -> None:
    """What is not found is padding, or what no reader looks at."""
    torch.save({"a": torch.ones(3), "b": torch.zeros(2)}, path)
    data = path.read_bytes()
    loaded = stock_load(path)
    for offset in range(0, len(data), 5):
        path.write_bytes(data)
        flip(path, offset)
        result = verify(path)
        assert result.exit_code in (0, 1, 2), offset
        assert len(result.stderr.splitlines()) <= 1
        if result.exit_code == 0:
            again = stock_load(path)
            assert all(torch.equal(loaded[key], again[key]) for key in loaded), offset


def test_many_records_take_linear_time(path: Path) -> None:
    torch.save([torch.ones(1) for _ in range(20_000)], path)
    begin = time.perf_counter()
    assert len(verify_file(path).whole or []) == 20_000
    assert time.perf_counter() - begin < 5  # quadratic: 12 s


def test_damaged_header(path: Path) -> None:
    with ptsave.open(path) as archive:
        record = archive.info("layer.4").record
    header = zipfile.ZipFile(path).getinfo(f"checkpoint/{record}").header_offset
    flip(path, header, offset_of(path, "layer.9"))
    found = verify_file(path)
    assert [problem.entries for problem in found.problems] == [["layer.4"], ["layer.9"]]


def test_damaged_pickle(path: Path) -> None:
    flip(path, 100, offset_of(path, "layer.9"))
    found = verify_file(path)
    assert [problem.record for problem in found.problems] == ["data.pkl", "data/9"]
    assert found.whole is None


def test_truncated_at_any_byte(path: Path) -> None:
    data = path.read_bytes()
    with ptsave.open(path) as archive:
        ends = {i.name: (i.offset or 0) + i.nbytes for i in archive.infos()}
    for end in range(4, len(data), 97):
        path.write_bytes(data[:end])
        result = verify(path)
        assert result.exit_code == 1, end
        assert "is cut short" in result.stdout
        whole = verify_file(path).whole or []
        # A payload is known to be whole by the descriptor behind it.
        assert {n for n, e in ends.items() if e + 16 <= end} >= set(whole)
        if end > ends["layer.0"] + 16:
            assert set(whole) == {name for name, e in ends.items() if e + 16 <= end}


def test_damage_in_front_of_the_cut(path: Path) -> None:
    flip(path, offset_of(path, "layer.1"))
    path.write_bytes(path.read_bytes()[: offset_of(path, "layer.5") + 30])
    assert verify_file(path).whole == ["layer.0", "layer.2", "layer.3", "layer.4", "tied"]


def test_without_checksums(path: Path) -> None:
    save_without_checksums(tensors(), path)
    flip(path, offset_of(path, "layer.2"))
    result = verify(path)
    assert result.exit_code == 0
    assert "have no checksums" in result.stderr
    lines = result.output.splitlines()  # the verdict, then what could not be checked
    assert [line.partition(":")[0] for line in lines] == [str(path), "ptsave"]
    assert verify("-q", path).stderr == ""


def test_compressed(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.pt"
    packed.write_bytes(deflated(path.read_bytes()))
    assert verify(packed).exit_code == 0
    with zipfile.ZipFile(packed) as archive:
        flip(packed, *(archive.getinfo(f"archive/data/{i}").header_offset + 46 for i in (0, 5)))
    found = verify_file(packed)
    assert {problem.record for problem in found.problems} == {"data/0", "data/5"}


def test_needs_more_than_weights_only(path: Path) -> None:
    torch.save({"t": torch.ones(3), "random": random.Random(0)}, path)
    result = verify(path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1 tensor" in result.stdout
    data = path.read_bytes()
    flip(path, data.index(torch.ones(3).numpy().tobytes()))
    assert verify(path).exit_code == 1


def test_object_that_is_loaded_as_a_whole(path: Path) -> None:
    torch.save({"sparse": torch.eye(4).to_sparse(), "dense": torch.full((3,), 7.0)}, path)
    assert verify(path).exit_code == 0
    flip(path, path.read_bytes().index(torch.full((3,), 7.0).numpy().tobytes()))
    assert verify_file(path).problems[0].entries == ["dense"]


def test_formats_without_checksums(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"a": torch.ones(300)}, tmp_path / "model.safetensors")
    for name in ("old.pt", "model.safetensors"):
        path = tmp_path / name
        result = verify(path)
        assert result.exit_code == 0
        assert "no checksums" in result.stderr
        for end in (len(path.read_bytes()) - 1, 40):
            path.write_bytes(path.read_bytes()[:end])
            assert verify(path).exit_code == 1


def test_url_of_a_file_beyond_its_tail() -> None:
    """What is fetched with the directory is the end of a file, not its pickle."""
    url = "memory://verify/large.pt"
    ptsave.save({"weight": torch.ones(100_000), "path": Path("x")}, url)
    assert verify(url).exit_code == 0
    ptsave.save({"weight": torch.ones(100_000), "step": 3}, url)
    result = verify(url)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1 tensor" in result.stdout
    found = verify_file(url)
    assert (found.problems, found.whole) == ([], ["weight"])


def test_several_files(path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pt"
    bad.write_bytes(path.read_bytes())
    flip(bad, offset_of(bad, "layer.2"))
    (tmp_path / "page.pt").write_text("<html>")
    assert verify(path, path).exit_code == 0
    assert verify(path, bad).exit_code == 1
    result = verify(bad, tmp_path / "page.pt", tmp_path / "missing.pt", path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert result.stdout.count("whole (") == 1


@pytest.fixture(params=["safetensors", "pt"])
def model(request: Any, tmp_path: Path) -> Path:
    module = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 4))
    ptsave.save_model(module, tmp_path, format=request.param, max_shard_size="5KB")
    return tmp_path


def test_directory(model: Path) -> None:
    assert verify(model).exit_code == 0
    index = next(model.glob("*.json"))
    content = json.loads(index.read_text())
    content["weight_map"]["other"] = content["weight_map"]["0.bias"]
    index.write_text(json.dumps(content))
    result = verify(model)
    assert result.exit_code == 1
    assert "other is not in" in result.stdout


@pytest.mark.parametrize("name", ["", "INDEX"])
@pytest.mark.parametrize("is_url", [False, True])
def test_directory_without_a_shard(model: Path, is_url: bool, name: str) -> None:
    next(model.glob("*00002-of*")).unlink()
    index = next(model.glob("*.index.json")).name
    fsspec.filesystem("memory").put(f"{model}/", "/verify/model/", recursive=True)
    folder = "memory://verify/model" if is_url else str(model)
    source = f"{folder}/{index}" if name else folder
    result = verify(source)
    assert result.exit_code == 1
    assert f"{source}: DAMAGED: {folder}/" in result.stdout
    assert f"a shard is missing: {folder}/{index} says that it holds " in result.stdout
    found = verify_file(source).problems + verify_directory(source).problems
    assert len(found) == 2
    assert all("a shard is missing" in problem.reason for problem in found)
    with pytest.raises(FileNotFoundError, match=r"a shard is missing: .* says that it holds "):
        ptsave.load(source)
    fsspec.filesystem("memory").rm("/verify", recursive=True)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({"same": torch.ones(2)}, tmp_path / name)
    result = verify(tmp_path)
    assert result.exit_code == 1
    assert "same is in" in result.stdout


# ------------------------------------------------------------------------------------- directories


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """The directory of a checkpoint of transformers' Trainer, and accelerate's files."""
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    module = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 4))
    ptsave.save_model(module, folder, max_shard_size="5KB")
    save_file({"0.weight": torch.ones(2)}, folder / "model_1.safetensors")
    for name in TORCH_FILES:
        torch.save({"w": torch.full((1000,), 7.0), "step": 1}, folder / name)
    torch.save({"w": torch.ones(9)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    (folder / "random_states_1.pkl").write_bytes(pickle.dumps({"seed": 1}))
    (folder / "config.json").write_text("{}")
    (folder / "merges.txt").write_text("a b")
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    (folder / "global_step4").mkdir()
    torch.save(1, folder / "global_step4" / "mp_rank_00_model_states.pt")
    return folder


TORCH_FILES = [
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_1.pth", "training_args.bin"),
    *("optimizer.bin", "random_states_0.pkl", "step-00000003.pt", "step-00000004.pt", "last.ckpt"),
    "no_suffix",
]


def test_every_file_of_a_directory(trainer: Path) -> None:
    result = verify(trainer)
    assert result.exit_code == 0
    shards = sorted(p.name for p in trainer.glob("model-*-of-*"))
    *files, last = result.stdout.splitlines()
    states = [line.rpartition(" (")[0].removeprefix(f"{trainer}/") for line in files]
    checked = [*shards, *TORCH_FILES]
    assert sorted(states) == sorted(
        [f"{name}: whole" for name in checked]
        + [f"{name}: no checksums" for name in ("model_1.safetensors", "old.pt")]
    )
    assert last.startswith(f"{trainer}: not looked at: config.json, ")
    rest = verify("--list", trainer).stdout.splitlines()[-1].partition("not looked at: ")[2]
    assert rest == (
        "config.json, merges.txt, random_states_1.pkl (a pickle that torch.save has not written), "
        "tokenizer.model, global_step4/"
    )
    found = verify_directory(str(trainer))
    assert [Path(file.path).name for file in found.files if file.has_checksums] == sorted(checked)
    assert not found.is_damaged


@pytest.mark.parametrize("name", ["optimizer.pt", "random_states_0.pkl", "last.ckpt", "no_suffix"])
def test_one_damaged_file_of_a_directory(trainer: Path, name: str) -> None:
    flip(trainer / name, torch.full((9,), 7.0).numpy().tobytes())
    result = verify(trainer)
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if "DAMAGED" in line] == [
        line for line in result.stdout.splitlines() if line.startswith(f"{trainer / name}: DAMAGED")
    ]
    assert result.stdout.count("damaged: w") == 1
    found = verify_directory(str(trainer))
    assert [Path(file.path).name for file in found.files if file.problems] == [name]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("optimizer.pt", b""), ("optimizer.bin", b"\0" * 5000)),
        *(("new.pth", b"version https://git-lfs"), ("adapter_model.bin", b"Entry not found")),
    ],
)
def test_what_came_instead_of_a_checkpoint(trainer: Path, name: str, content: bytes) -> None:
    (trainer / name).write_bytes(content)
    result = verify(trainer)
    assert result.exit_code == 1
    assert f"{trainer}: DAMAGED: {trainer / name} is not a checkpoint: " in result.stdout


def test_first_byte_of_a_file_in_a_directory(trainer: Path) -> None:
    flip(trainer / "optimizer.bin", 0)
    assert verify(trainer).exit_code == 1


def test_directory_of_an_asynchronous_checkpointer(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    with ptsave.AsyncCheckpointer(tmp_path, keep=2) as checkpointer:
        for step in range(2):
            checkpointer.save(step, model=model)
    (tmp_path / ".step-00000002.pt.0123456789abcdef.ptsave").write_bytes(b"PK\3\4half of it")
    result = verify(tmp_path)
    assert result.exit_code == 0
    assert result.stdout.count("whole (") == 2
    assert "(a save that has not ended)" in result.stdout


def test_a_cut_file_says_how_it_is_read(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    result = verify(path)
    assert f"read them with: ptsave extract {path} --whole -o OUT" in result.stdout


def test_directories_without_checkpoints(tmp_path: Path) -> None:
    result = verify(tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"ptsave: {tmp_path}: no checkpoint in this directory\n"
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    assert "to search a subdirectory, pass its path (unet)" in fail("verify", tmp_path)
    (tmp_path / ".metadata").write_bytes(b"x")
    assert "torch.distributed.checkpoint" in verify(tmp_path).stderr


def test_sets_that_lack_something(trainer: Path) -> None:
    """Numbers tell where there is no index; a link to nowhere is named; the rest is verified."""
    next(trainer.glob("*.index.json")).unlink()
    assert verify(trainer).exit_code == 0
    shard = next(trainer.glob("model-00002-of-*"))
    shard.unlink()
    result = verify(trainer)
    assert result.exit_code == 1
    assert f"{trainer}: DAMAGED: {shard}: a shard is missing: there is model-00001" in result.stdout
    (trainer / "scheduler.pt").unlink()
    (trainer / "scheduler.pt").symlink_to(trainer / "nowhere")
    result = verify(trainer)
    assert "scheduler.pt is not a checkpoint: it is a link that leads nowhere" in result.stdout
    n_shards = len([*trainer.glob("model-*-of-*")])
    assert result.stdout.count("whole (") == n_shards + len(TORCH_FILES) - 1


def test_progress_over_a_directory(trainer: Path) -> None:
    done: list[int] = []
    found = verify_directory(str(trainer), done.append)
    assert done == sorted(done)
    assert done[-1] <= sum(file.nbytes for file in found.files)


# ------------------------------------------------------------------------------------------ globals


OBJECTS: dict[str, Any] = {
    "tensors": {"t": torch.ones(2), "p": torch.nn.Parameter(torch.ones(1))},
    "containers": {"set": {1}, "ordered": collections.OrderedDict(a=1), "range": range(3)},
    "classes": [Path("x"), fractions.Fraction(1, 2), datetime.timedelta(1)],
    "module": torch.nn.Linear(1, 1),
    "nothing": None,
}


globals_of = partial(run, "globals")


@pytest.mark.parametrize("name", OBJECTS)
def test_as_torch_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(OBJECTS[name], path)
    expected = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    assert unsafe_globals(required_globals(path)) == expected
    result = globals_of(path)
    assert result.exit_code == (1 if expected else 0)
    for each in expected:
        assert f"not allowed    {each}\n" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("protocol", [0, 3, 4, 5])
def test_other_protocols_name_the_same(name: str, protocol: int, tmp_path: Path) -> None:
    """torch reads only protocol 2 here."""
    usual, other = tmp_path / "usual.pt", tmp_path / "other.pt"
    torch.save(OBJECTS[name], usual)
    torch.save(OBJECTS[name], other, pickle_protocol=protocol)
    needed = set(unsafe_globals(required_globals(usual)))
    found = set(unsafe_globals(required_globals(other)))
    builtins = {each for each in found ^ needed if not each.startswith(("builtins.", "copyreg."))}
    assert not builtins


def test_the_code_allows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"f": fractions.Fraction(1, 2), "d": datetime.timedelta(1)}, path)
    needed = required_globals(path)
    with pytest.raises(pickle.UnpicklingError):
        stock_load(path, weights_only=True)
    code = code_to_allow({name: needed[name] for name in unsafe_globals(needed)})
    assert code.splitlines()[1] in globals_of(path).stdout
    exec(code)
    assert stock_load(path, weights_only=True)["d"] == datetime.timedelta(1)
    assert globals_of(path).exit_code == 0  # those that the user has allowed


def test_nothing_runs_and_what_is_never_allowed(tmp_path: Path) -> None:
    path, mark = tmp_path / "file.pt", tmp_path / "mark"
    torch.save(Calls(os.mkdir, str(mark)), path)
    result = globals_of(path)
    assert result.exit_code == 1
    assert "never allowed  posix.mkdir" in result.stdout
    assert "add_safe_globals" not in result.stdout
    assert not mark.exists()


def test_all(tmp_path: Path) -> None:
    torch.save(OBJECTS["tensors"], tmp_path / "file.pt")
    result = globals_of("--all", tmp_path / "file.pt")
    assert result.exit_code == 0
    assert "allowed        torch._utils._rebuild_tensor_v2" in result.stdout


def test_every_kind_of_file(tmp_path: Path) -> None:
    plain, packed, old = (tmp_path / name for name in ("file.pt", "packed.pt", "old.pt"))
    torch.save([Path("x"), torch.ones(2)], plain)
    packed.write_bytes(deflated(plain.read_bytes()))
    torch.save([Path("x"), torch.ones(2)], old, _use_new_zipfile_serialization=False)
    fsspec.filesystem("memory").pipe("/globals/file.pt", plain.read_bytes())
    for source in (plain, packed, old, "memory://globals/file.pt"):
        needed = [f"{type(tmp_path).__module__}.PosixPath"]
        assert unsafe_globals(required_globals(source)) == needed, source


def test_files_without_pickles(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert globals_of(tmp_path / "model.safetensors").exit_code == 0
    (tmp_path / "page.pt").write_text("<html>")
    assert globals_of(tmp_path).exit_code == 0  # the model in the directory is that file


def test_globals_of_a_damaged_pickle(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(OBJECTS["classes"], path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for end in range(30, 200, 7):
        path.write_bytes(data[:end])
        fail("globals", path)
