"""accelerate's states by ptsave: resumed exactly, complete or not there."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from client_checkpoints import assert_same_state, names_written_by_the_engine

import ptsave
from ptsave.integrations import accelerate as integration
from ptsave.integrations import staged_folders
from ptsave.integrations.staged_folders import StagedFolder

pytestmark = pytest.mark.filterwarnings("ignore")


def prepared(accelerate: Any, *, engine: bool = True, **options: Any) -> tuple[Any, ...]:
    accelerator = accelerate.Accelerator(cpu=True, **options)
    if engine:
        integration.enable(accelerator, fsync=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def train(parts: tuple[Any, ...], n_steps: int) -> None:
    accelerator, model, optimizer, scheduler = parts
    for _ in range(n_steps):
        loss = model(torch.randn(4, 8)).square().mean() * random.random()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def state_of(parts: tuple[Any, ...]) -> dict[str, Any]:
    _, model, optimizer, scheduler = parts
    flat = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        flat.update({f"{number}.{key}": value for key, value in state.items()})
    return {**flat, "lr": scheduler.get_last_lr(), "rng": torch.get_rng_state()}


@pytest.mark.parametrize("loads_with_engine", [True, False])
def test_resumes_exactly(loads_with_engine: bool, accelerate: Any, tmp_path: Path) -> None:
    random.seed(0)
    parts = prepared(accelerate)
    train(parts, 3)
    assert str(parts[0].save_state(tmp_path / "deep" / "state")) == str(tmp_path / "deep/state")
    train(parts, 3)
    resumed = prepared(accelerate, engine=loads_with_engine)
    resumed[0].load_state(str(tmp_path / "deep" / "state"))
    train(resumed, 3)
    assert_same_state(state_of(resumed), state_of(parts))
    assert os.listdir(tmp_path / "deep") == ["state"]


def test_same_files_as_stock(
    accelerate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = names_written_by_the_engine(monkeypatch)
    parts = prepared(accelerate)
    train(parts, 1)
    parts[0].save_state(tmp_path / "ours")
    assert sorted(written) == sorted(os.listdir(tmp_path / "ours"))  # all of it by the engine
    integration.disable(parts[0])
    parts[0].save_state(str(tmp_path / "stock"))
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
    for name in ("model.safetensors", "optimizer.bin", "scheduler.bin"):
        assert (ours / name).read_bytes() == (stock / name).read_bytes(), name


def test_failed_save_changes_nothing(
    accelerate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = prepared(accelerate)
    parts[0].save_state(tmp_path / "state")
    before = {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    train(parts, 1)

    def fail(_: StagedFolder) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StagedFolder, "publish", fail)
        with pytest.raises(OSError, match="No space left"):
            parts[0].save_state(tmp_path / "state")
    assert {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()} == before
    parts[0].save_state(tmp_path / "state")  # replaces it as a whole
    assert (tmp_path / "state" / "optimizer.bin").read_bytes() != before["optimizer.bin"]
    assert os.listdir(tmp_path) == ["state"]


def test_other_files_stay(accelerate: Any, tmp_path: Path) -> None:
    logs = tmp_path / "state" / "logs"
    logs.mkdir(parents=True)
    (logs / "log").write_text("loss")
    (tmp_path / "state" / "optimizer.bin").touch()
    (tmp_path / "link").symlink_to("state")
    prepared(accelerate)[0].save_state(tmp_path / "link")
    assert (logs / "log").read_text() == "loss"
    assert (tmp_path / "state" / "optimizer.bin").stat().st_size
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "state"]


@pytest.mark.parametrize("engine", [True, False])
def test_other_files_stay_in_subdirectories(engine: bool, accelerate: Any, tmp_path: Path) -> None:
    """Also in those that a hook writes, as diffusers' do."""
    accelerator, model, *_ = prepared(accelerate, engine=engine)

    def write(_: Any, __: Any, output_dir: str) -> None:
        folder = Path(output_dir) / "unet"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), folder / "weights.pt")

    accelerator.register_save_state_pre_hook(write)
    deep = tmp_path / "state" / "unet" / "deep"
    deep.mkdir(parents=True)
    (deep / "note").write_text("mine")
    (deep.parent / "README.md").write_text("mine, too")
    (deep.parent / "weights.pt").touch()
    accelerator.save_state(str(tmp_path / "state"))
    assert (deep / "note").read_text() == "mine"
    assert (deep.parent / "README.md").read_text() == "mine, too"
    assert (deep.parent / "weights.pt").stat().st_size
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("engine", [True, False])
def test_file_of_that_name_stays(engine: bool, accelerate: Any, tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("a week's work")
    with pytest.raises(FileExistsError, match=r"results\.csv"):
        prepared(accelerate, engine=engine)[0].save_state(str(tmp_path / "results.csv"))
    assert (tmp_path / "results.csv").read_text() == "a week's work"
    assert os.listdir(tmp_path) == ["results.csv"]


@pytest.mark.parametrize("engine", [True, False])
def test_current_directory(
    engine: bool, accelerate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "deep").mkdir(parents=True)
    (tmp_path / "run" / "train.log").write_text("loss")
    (tmp_path / "run" / "optimizer.bin").touch()
    parts = prepared(accelerate, engine=engine)
    for directory, name in (("run", "."), ("run/deep", "..")):
        monkeypatch.chdir(tmp_path / directory)
        parts[0].save_state(name)
        Path("more.log").touch()
        parts[0].load_state(name)
        assert (tmp_path / directory).samefile(Path.cwd())
    assert (tmp_path / "run" / "train.log").read_text() == "loss"
    assert (tmp_path / "run" / "optimizer.bin").stat().st_size
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".")]
    with pytest.raises(FileNotFoundError):
        parts[0].save_state("")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("is_known", [True, False])
def test_directory_that_cannot_be_renamed(
    is_known: bool, accelerate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, say; some of them are found out when it is renamed."""

    def fail(*_: str) -> bool:
        raise OSError(18, "Invalid cross-device link")

    state = tmp_path / "state"
    (state / "logs").mkdir(parents=True)
    (state / "optimizer.bin").touch()
    (state / "logs" / "log").write_text("loss")
    inode = state.stat().st_ino
    if is_known:
        monkeypatch.setattr(staged_folders, "_is_fixed", lambda path: path == str(state))
    else:
        monkeypatch.setattr(staged_folders, "_exchange", fail)
    parts = prepared(accelerate)
    accelerator = parts[0]
    accelerator.register_save_state_pre_hook(
        lambda *args: seen.append((args[-1], os.listdir(tmp_path)))
    )
    seen: list[tuple[str, list[str]]] = []
    for _ in range(2):
        train(parts, 1)
        accelerator.save_state(state)
    accelerator.load_state(str(state))
    assert state.stat().st_ino == inode
    assert seen[0][0].startswith(f"{state}/") == is_known
    assert (len(seen[0][1]) == 1) == is_known
    assert (state / "optimizer.bin").stat().st_size
    assert (state / "logs" / "log").read_text() == "loss"
    assert not list(tmp_path.rglob(".*"))


def test_longest_name(accelerate: Any, tmp_path: Path) -> None:
    state = tmp_path / ("ü" * 127)
    parts = prepared(accelerate)
    for _ in range(2):
        parts[0].save_state(str(state))
    parts[0].load_state(str(state))
    assert os.listdir(tmp_path) == [state.name]


def test_other_process_saves_there(accelerate: Any, tmp_path: Path) -> None:
    parts = prepared(accelerate)
    state = str(tmp_path / "state")
    parts[0].save_state(state)
    other = StagedFolder(state, fsync=False, keeps_others=True)
    other.claim()
    os.makedirs(other.path)
    with pytest.raises(ptsave.SaveError, match=r"another process is saving there.*state"):
        parts[0].save_state(state)
    assert os.path.isdir(other.path)
    parts[0].load_state(state)
    other.discard()
    parts[0].save_state(state)
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl"])
def test_damaged_file(name: str, accelerate: Any, tmp_path: Path) -> None:
    """Also where accelerate goes on without what it cannot read."""
    parts = prepared(accelerate)
    train(parts, 1)
    parts[0].save_state(tmp_path / "state")
    flip_middle(tmp_path / "state" / name, "data/0")
    with pytest.raises(ptsave.CorruptCheckpointError, match=name.replace(".", r"\.")):
        parts[0].load_state(str(tmp_path / "state"))


def test_automatic_names(accelerate: Any, tmp_path: Path) -> None:
    project = accelerate.utils.ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
    )
    parts = prepared(accelerate, project_config=project)
    for _ in range(3):
        parts[0].save_state()
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["checkpoint_1", "checkpoint_2"]
    assert project.automatic_checkpoint_naming
    parts[0].load_state()
    project.iteration = 2
    with pytest.raises(ValueError, match="already exists"):
        parts[0].save_state()
    shutil.rmtree(tmp_path / "checkpoints")


def test_leftovers_are_no_checkpoints(accelerate: Any, tmp_path: Path) -> None:
    """Of all names in the directory accelerate takes one for the latest checkpoint."""
    project = accelerate.utils.ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True
    )
    parts = prepared(accelerate, project_config=project)
    names: list[str] = []
    parts[0].register_save_state_pre_hook(
        lambda *_: names.extend(os.listdir(tmp_path / "checkpoints"))
    )
    parts[0].save_state()
    assert names == []
    for loads in (True, False):
        (tmp_path / "checkpoints/.checkpoint_7.ptsave/checkpoint_7").mkdir(parents=True)
        (tmp_path / ".checkpoints.checkpoint_1.ptsave/checkpoint_1").mkdir(parents=True)
        if loads:
            parts[0].load_state()
        else:
            parts[0].save_state()
        assert os.listdir(tmp_path) == ["checkpoints"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_1"]


def test_oldest_is_removed_by_its_real_name(accelerate: Any, tmp_path: Path) -> None:
    project = accelerate.utils.ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1, iteration=8
    )
    (tmp_path / "checkpoints" / "checkpoint_007").mkdir(parents=True)
    prepared(accelerate, project_config=project)[0].save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_8"]


def test_all_processes_learn_that_one_failed(
    accelerate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = prepared(accelerate)

    def fail(folder: StagedFolder) -> None:
        raise OSError(28, "No space left on device")

    class Of2(type(parts[0])):  # type: ignore[misc]
        num_processes = 2

    gathered: list[Any] = []

    def gather(objects: list[Any]) -> list[Any]:
        gathered.extend(objects)
        return [*objects, None]

    monkeypatch.setattr(StagedFolder, "publish", fail)
    monkeypatch.setattr("accelerate.utils.gather_object", gather)
    parts[0].__class__ = Of2
    with pytest.raises(OSError, match="No space left"):
        parts[0].save_state(tmp_path / "step")
    assert os.listdir(tmp_path) == []
    assert gathered[:-1] == [None, None]
    assert "No space left on device" in gathered[-1]

    class Other(Of2):
        is_main_process = False

    monkeypatch.setattr("accelerate.utils.gather_object", lambda _: [gathered[-1], None])
    parts[0].__class__ = Other
    with pytest.raises(ptsave.SaveError, match=r"step: rank 0 could not.*No space left"):
        parts[0].save_state(tmp_path / "step")
