"""Files of which each rank has written one: one source for open, ls, verify, diff, convert."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from command_line import run
from stock_comparison import assert_same_object

import ptsave
from ptsave.tree.tree import EntryTree


def assert_holds(archive: ptsave.Archive, whole: Any) -> None:
    expected = dict(EntryTree(whole).named_tensors())
    assert list(archive.keys()) == list(expected)
    assert_same_object({name: archive.get_tensor(name) for name in expected}, expected)


def items_of_ranks(folder: Path) -> dict[str, Any]:
    """Write files as torch_checkpointing names them, of eleven ranks; return what they are."""
    whole: dict[str, Any] = {"model": {}, "optim": {}}
    for rank in range(11):
        for item in whole if rank < 2 else ("model",):
            obj = {"weight": torch.full((70, rank), float(rank)), "step": rank}
            torch.save(obj, folder / f"{item}_{rank}.pt")
            whole[item][f"rank{rank}"] = obj
    return whole


def parts_of_steps(folder: Path) -> dict[str, Any]:
    """Save two steps on two ranks; return what the later one is."""
    models = [torch.nn.Linear(20, 30) for _ in range(2)]

    def save(rank: int) -> None:
        with ptsave.AsyncCheckpointer(folder, rank=rank, world_size=2, keep=2) as checkpointer:
            for step in (9, 10):
                checkpointer.save(step, model=models[rank], number=step)

    with ThreadPoolExecutor() as threads:  # they wait for each other
        list(threads.map(save, range(2)))
    return {
        f"rank{rank}": {"model": model.state_dict(), "number": 10}
        for rank, model in enumerate(models)
    }


def parts_of_a_model(folder: Path) -> dict[str, Any]:
    """Write a model that was divided among ranks, as Llama's."""
    whole = {}
    for rank in range(2):
        whole[f"rank{rank}"] = {"weight": torch.full((3, 4), float(rank))}
        torch.save(whole[f"rank{rank}"], folder / f"consolidated.0{rank}.pth")
    return whole


@pytest.mark.parametrize("write", [items_of_ranks, parts_of_steps, parts_of_a_model])
def test_all_ranks_are_one_checkpoint(tmp_path: Path, write: Any) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    whole = write(folder)
    with ptsave.open(folder) as archive:
        assert_holds(archive, whole)
        name = next(str(each) for each in archive if str(each).endswith("weight"))
        assert torch.equal(archive.get_slice(name)[1:3], archive.get_tensor(name)[1:3])
        archive.verify()
    ptsave.convert(folder, tmp_path / "whole.pt")
    assert_same_object(torch.load(tmp_path / "whole.pt"), whole)
    assert run("diff", folder, tmp_path / "whole.pt").exit_code == 0
    listed = run("ls", folder).output
    assert ("rank1):" in listed) is (write is not parts_of_a_model)  # whose names are found later
    assert run("extract", folder, name, "-o", tmp_path / "one.pt").exit_code == 0
    assert json.loads(run("ls", folder, "--json").output)["files"]
    assert run("verify", folder).exit_code == 0


@pytest.mark.parametrize("write", [items_of_ranks, parts_of_steps])
def test_what_is_damaged_or_missing(tmp_path: Path, write: Any) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    write(folder)
    path = sorted(folder.glob("[!.]*"))[1]
    copy = shutil.copy(path, tmp_path / "copy")
    flip_middle(path, "data/0")
    result = run("verify", folder)
    assert result.exit_code == 1
    assert path.name in result.output
    shutil.copy(copy, path)
    assert run("verify", folder).exit_code == 0
    path = folder / "model_1.pt" if write is items_of_ranks else path
    path.unlink()
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "missing" in result.output
    if write is items_of_ranks:
        with pytest.raises(FileNotFoundError, match=r"rank 1 is missing.*model_1\.pt"):
            ptsave.open(folder)
        return
    with ptsave.open(folder) as archive:  # the step that is whole
        assert archive["rank1.number"] == 10
    for each in folder.glob("*rank-1*"):
        each.unlink()
    with pytest.raises(FileNotFoundError, match=r"a rank's part is missing.*rank-1-of-2"):
        ptsave.open(folder)


def test_the_last_of_ten_saves_of_a_step(tmp_path: Path) -> None:
    for name, counts in {"a": (9, 10), "b": (10,)}.items():
        (tmp_path / name).mkdir()
        torch.save({"number": 0}, tmp_path / name / "other.pt")
        for count in counts:
            for rank in range(2):
                part = f"step-00000001.{'0' * 16}-{count}.rank-{rank}-of-2.pt"
                torch.save({"number": count}, tmp_path / name / part)
    assert ptsave.compare(tmp_path / "a", tmp_path / "b").equal


def test_loads_of_a_step_say_what_does_it(tmp_path: Path) -> None:
    parts_of_steps(tmp_path)
    with pytest.raises(ValueError, match=r"holds \d files in which ranks.*restore\(\)"):
        ptsave.load(tmp_path)
    with pytest.raises(ValueError, match=r"holds \d files in which ranks.*restore\(\)"):
        ptsave.load_into(tmp_path, torch.nn.Linear(20, 30))


def test_names_that_only_look_like_ranks(tmp_path: Path) -> None:
    for number in (10, 20):
        torch.save({"weight": torch.ones(number)}, tmp_path / f"epoch_{number}.pt")
    with pytest.raises(ValueError, match="<item>_<rank>"):
        ptsave.open(tmp_path)
    assert run("verify", tmp_path).exit_code == 0


def test_at_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    whole = items_of_ranks(tmp_path)
    url = "memory://test_rank_sets"
    fsspec.filesystem("memory").put(f"{tmp_path}/", f"{url}/", recursive=True)
    with ptsave.open(url) as archive:
        assert_holds(archive, whole)
    assert run("verify", url).exit_code == 0
    assert run("ls", url).exit_code == 0
    fsspec.filesystem("memory").rm(url, recursive=True)
