"""Lightning with ptsave's plug-ins: resumed exactly, verified, whole or not at all."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pytest
import torch
import url_file_systems
from _corruption import flip_middle
from _system import Child
from client_checkpoints import imported, killed_by_itself

import ptsave
from ptsave.background import saves as background
from ptsave.integrations import checkpoint_io, lightning, pending_saves
from ptsave.integrations.checkpoint_io import AsyncCheckpointIO, CheckpointIO
from ptsave.integrations.pending_saves import PendingSaves, StagedFile
from ptsave.integrations.staged_folders import StagedFolder

PACKAGES = ("lightning", "pytorch_lightning")
KINDS = ("CheckpointIO", "AsyncCheckpointIO")


@pytest.fixture(params=PACKAGES[:1])  # the other has the same plug-ins, over its own classes
def package(request: pytest.FixtureRequest) -> str:
    imported(request.param)
    return str(request.param)


def plug_in(package: str, kind: str, **options: Any) -> Any:
    module = importlib.import_module(f"ptsave.integrations.{package}")
    return getattr(module, kind)(**options)


def library(package: str) -> ModuleType:
    name = "lightning.pytorch" if package == "lightning" else package
    return importlib.import_module(name)


def trainer(package: str, root: Path, *plugins: Any, epochs: int, **options: Any) -> Any:
    defaults = {
        "max_epochs": epochs,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(root),
        "plugins": list(plugins),
        "callbacks": [
            library(package).callbacks.ModelCheckpoint(dirpath=str(root / "ckpt"), save_last=True)
        ],
    }
    return library(package).Trainer(**{**defaults, **options})


def module(package: str) -> Any:
    """Return a model whose loss also depends on the random state that a resumed run must have."""

    class Model(library(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(1)
            data = torch.utils.data.TensorDataset(torch.randn(12, 8, generator=generator))
            return torch.utils.data.DataLoader(data, batch_size=4)

    torch.manual_seed(0)
    return Model()


def fit(package: str, root: Path, *plugins: Any, epochs: int, **options: Any) -> Any:
    model = module(package)
    fitted = trainer(package, root, *plugins, epochs=epochs)
    fitted.fit(model, **options)
    return model, fitted


def assert_equal_states(model: Any, other: Any) -> None:
    for key, value in model[0].state_dict().items():
        assert torch.equal(value, other[0].state_dict()[key]), key
    states, others = (each[1].optimizers[0].state_dict()["state"] for each in (model, other))
    for number, state in states.items():
        for key, value in state.items():
            assert torch.equal(value, others[number][key]), key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_resumes_exactly(package: str, kind: str, tmp_path: Path) -> None:
    stock = fit(package, tmp_path / "stock", epochs=4)
    fit(package, tmp_path / "ours", plug_in(package, kind), epochs=2)
    last = tmp_path / "ours" / "ckpt" / "last.ckpt"
    resumed = fit(package, tmp_path / "ours", plug_in(package, kind), epochs=4, ckpt_path=str(last))
    assert_equal_states(resumed, stock)
    # The older "epoch=..." file has gone, and nothing is left beside.
    assert sorted(os.listdir(last.parent)) == ["epoch=3-step=12.ckpt", "last.ckpt"]
    with ptsave.open(last) as archive:
        assert archive.info("state_dict.layer.0.weight").shape == (16, 8)
    assert torch.load(last)["global_step"] == 12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file(package: str, kind: str, tmp_path: Path) -> None:
    fit(package, tmp_path, plug_in(package, kind), epochs=1)
    last = tmp_path / "ckpt" / "last.ckpt"
    flip_middle(last, "data/0")
    with pytest.raises(ptsave.CorruptCheckpointError, match=r"last\.ckpt") as caught:
        fit(package, tmp_path, plug_in(package, kind), epochs=2, ckpt_path=str(last))
    assert caught.value.record == "data/0"
    assert caught.value.entries
    loaded = plug_in(package, kind, verify=False).load_checkpoint(last)
    assert loaded["global_step"] == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_fabric(package: str, kind: str, tmp_path: Path) -> None:
    fabric_module = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    fabric_class = importlib.import_module(fabric_module).Fabric
    io = plug_in(package, kind)
    fabric = fabric_class(accelerator="cpu", devices=1, plugins=[io])
    layer = torch.nn.Linear(3, 3)
    model, optimizer = fabric.setup(layer, torch.optim.AdamW(layer.parameters()))
    fabric.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    path = tmp_path / "made" / "state.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    with torch.no_grad():
        expected = model.weight.clone()
        model.weight.zero_()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    assert torch.equal(model.weight, expected)
    assert state["step"] == 3
    io.teardown()


@pytest.mark.filterwarnings("ignore")
def test_loads_straight_into_a_model(package: str, tmp_path: Path) -> None:
    """Without the second copy of the model that a plug-in has to return."""
    model, _ = fit(package, tmp_path, plug_in(package, "CheckpointIO"), epochs=1)
    other = module(package)
    places = {name: each.data_ptr() for name, each in other.named_parameters()}
    torch.nn.init.zeros_(other.layer[0].weight)
    rest = ptsave.load_checkpoint(tmp_path / "ckpt" / "last.ckpt", state_dict=other)
    assert rest["global_step"] == 3
    for name, each in other.named_parameters():
        assert torch.equal(each, model.get_parameter(name)), name
        assert each.data_ptr() == places[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES, indirect=True)
def test_each_library_takes_its_own(package: str) -> None:
    fabric = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    base = importlib.import_module(f"{fabric}.plugins").CheckpointIO
    for kind in KINDS:
        io = plug_in(package, kind, fsync=True)
        assert isinstance(io, base)
        assert type(io).__module__ == f"ptsave.integrations.{package}"
        copy = pickle.loads(pickle.dumps(io))
        assert type(copy) is type(io)
        assert vars(copy)["_fsync"] is True
    module = importlib.import_module(f"ptsave.integrations.{package}")
    with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
        _ = module.Unknown


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.fabric.plugins.io.checkpoint_io", None)
    monkeypatch.delitem(vars(lightning), "CheckpointIO", raising=False)
    with pytest.raises(ImportError, match="pip install lightning"):
        _ = lightning.CheckpointIO


# ------------------------------------------------------------------------------------ the plug-ins


@pytest.fixture(params=KINDS)
def io(request: pytest.FixtureRequest) -> Any:
    return getattr(checkpoint_io, request.param)()


def test_options_are_carried(io: Any, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.ckpt"
    io.save_checkpoint({"t": torch.ones(2), "p": Path("x")}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        io.load_checkpoint(path, weights_only=True)
    assert io.load_checkpoint(path, weights_only=False)["p"] == Path("x")
    loaded = io.load_checkpoint(path, map_location="meta", weights_only=False)
    assert loaded["t"].device.type == "meta"
    io.remove_checkpoint(path)
    io.teardown()
    assert not path.exists()
    io.remove_checkpoint(path)  # as Lightning's own: not there, nothing to do


def test_options_that_are_none(io: Any, tmp_path: Path) -> None:
    for name in ("fsync", "atomic", "verify", "weights_only_check"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, not 'no'"):
            type(io)(**{name: "no"})
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={"key": 1})
    assert not (tmp_path / "x.ckpt").exists()


def test_urls(io: Any, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for url in (f"memory://run-{type(io).__name__}/sub/x.ckpt", f"file://{tmp_path}/new/x.ckpt"):
        io.save_checkpoint({"t": torch.arange(3)}, url)
        io.teardown()
        assert torch.equal(io.load_checkpoint(url)["t"], torch.arange(3))
        io.remove_checkpoint(url)
        io.teardown()
        with pytest.raises(FileNotFoundError):
            io.load_checkpoint(url)
    assert not files.exists(f"/run-{type(io).__name__}/sub/x.ckpt")


def test_options_of_a_call_are_those_of_its_checkpoint(io: Any) -> None:
    url_file_systems.register()
    url = f"{url_file_systems.GUARDED}://run/{type(io).__name__}.ckpt"
    for number in range(2):
        io.save_checkpoint({"n": number}, url, storage_options=url_file_systems.TOKEN)
        assert io.load_checkpoint(url) == {"n": number}
    io.remove_checkpoint(url)
    io.teardown()
    assert not url_file_systems.guarded().exists(url)
    with pytest.raises(OSError, match="token"):
        io.load_checkpoint(url)


def test_directories_are_removed(io: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sharded.ckpt"
    folder.mkdir()
    (folder / "part").write_bytes(b"1")
    io.remove_checkpoint(folder)
    assert not folder.exists()


# ----------------------------------------------------------------------------------- pending saves


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Hold back the writing of saves until it is set."""
    opened = threading.Event()
    write = background.BackgroundSave.write

    def wait_and_write(save: Any) -> None:
        assert opened.wait(20)
        write(save)

    monkeypatch.setattr(background.BackgroundSave, "write", wait_and_write)
    yield opened
    opened.set()


def test_old_one_goes_when_the_new_one_is_there(gate: Any, tmp_path: Path) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    ptsave.save([1], old)
    saves = PendingSaves()
    saves.save([2], new)
    saves.remove(old)
    assert os.path.exists(old)
    assert not os.path.exists(new)
    gate.set()
    saves.wait()
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("error", [None, PermissionError("may not")])
def test_removals_that_come_while_others_are_done(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    removed = []

    def remove(path: str, _: object) -> None:
        removed.append(path)
        if len(removed) < 3:
            saves.remove(f"{path}+")
        if error is not None:
            raise error

    monkeypatch.setattr("ptsave.integrations.pending_saves.remove_checkpoint", remove)
    saves = PendingSaves()
    saves.save([1], str(tmp_path / "new"))
    saves.remove("old")
    gate.set()
    with nullcontext() if error is None else pytest.raises(PermissionError):
        saves.wait()
    old = os.path.abspath("old")
    assert removed == [old, f"{old}+", f"{old}++"]


def test_relative_paths_are_those_of_the_call(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may change its directory, as Hydra does, before the new checkpoint is there."""
    for name in ("here", "there"):
        (tmp_path / name / "run").mkdir(parents=True)
        ptsave.save([1], tmp_path / name / "run" / "old")
    (tmp_path / "link").symlink_to("here/run")
    monkeypatch.chdir(tmp_path / "here")
    io = AsyncCheckpointIO()
    io.save_checkpoint({}, "run/new")
    io.save_checkpoint({}, "../link/hpc_ckpt_1.ckpt")
    io.remove_checkpoint("../link/../run/old")
    monkeypatch.chdir(tmp_path / "there")
    gate.set()
    io.teardown()
    assert sorted(os.listdir(tmp_path / "here" / "run")) == ["hpc_ckpt_1.ckpt", "new"]
    assert os.listdir("run") == ["old"]


def test_old_one_stays_if_the_new_one_fails(gate: Any, tmp_path: Path) -> None:
    old, folder = str(tmp_path / "old"), tmp_path / "folder"
    ptsave.save([1], old)
    folder.mkdir()
    saves = PendingSaves()
    saves.save([2], str(folder / "new"))
    saves.remove(old)
    folder.rmdir()
    gate.set()
    with pytest.raises(ptsave.SaveError, match="folder"):
        saves.wait()
    saves.wait()  # raised once
    assert os.listdir(tmp_path) == ["old"]


def test_errors_surface_at_the_next_call(gate: Any, tmp_path: Path) -> None:
    io = AsyncCheckpointIO()
    calls: list[Any] = [
        lambda: io.save_checkpoint({}, tmp_path / "next"),
        lambda: io.remove_checkpoint(tmp_path / "next"),
        lambda: io.load_checkpoint(tmp_path / "next"),
        io.teardown,
    ]
    gate.set()
    for call in calls:
        folder = tmp_path / "folder"
        gate.clear()
        io.save_checkpoint({}, folder / "lost")
        folder.rmdir()
        assert io._saves._pending
        gate.set()
        io._saves.settle()
        with pytest.raises(ptsave.SaveError, match="lost"):
            call()
        io.teardown()


def test_a_new_save_of_the_removed_path_wins(gate: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    saves = PendingSaves()
    saves.save([1], path)
    saves.remove(path)
    saves.save([2], path)
    gate.set()
    saves.wait()
    assert torch.load(path) == [2]


def test_a_removal_is_dropped_before_the_copy(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may take longer than the save that the removal waits for."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    saves = PendingSaves()
    saves.save([1], str(tmp_path / "y"))
    saves.remove(str(path))

    def fail_late(*_: object, **__: object) -> None:
        gate.set()
        saves.settle()
        raise MemoryError

    monkeypatch.setattr(pending_saves, "async_save", fail_late)
    with pytest.raises(MemoryError):
        saves.save([2], str(path))
    assert path.read_bytes() == b"old"


def test_tensors_may_change_at_once(gate: Any, tmp_path: Path) -> None:
    io, weight = AsyncCheckpointIO(), torch.ones(1000)
    io.save_checkpoint({"w": weight}, tmp_path / "x")
    weight.zero_()
    gate.set()
    assert torch.equal(io.load_checkpoint(tmp_path / "x")["w"], torch.ones(1000))


def test_killed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """A process that is killed while the new checkpoint is written has the old one."""
    path = tmp_path / "last.ckpt"
    killed_by_itself(
        """
        import os, signal, sys, torch
        from ptsave.integrations.checkpoint_io import AsyncCheckpointIO
        io = AsyncCheckpointIO()
        io.save_checkpoint({"n": 1, "w": torch.ones(1 << 24)}, sys.argv[1])
        io.teardown()
        io.save_checkpoint({"n": 2, "w": torch.ones(1 << 24)}, sys.argv[1])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
    )
    loaded = ptsave.load(path)
    assert loaded["n"] in (1, 2)
    assert torch.equal(loaded["w"], torch.ones(1 << 24))


# --------------------------------------------------------------------------------------- SLURM jobs


def test_a_staged_folder_is_no_leftover_of_a_file(tmp_path: Path) -> None:
    """Its lock is on another file, so only its name tells."""
    folder = StagedFolder(str(tmp_path / "staged-v2"), fsync=False)
    folder.claim()
    os.makedirs(folder.path)
    CheckpointIO().save_checkpoint({}, tmp_path / "hpc_ckpt_1.ckpt")
    assert os.path.isdir(folder.path)
    folder.discard()


def _resumed_from(package: str, root: Path) -> Any:
    """Return the checkpoint that a requeued job of Lightning's begins with."""
    return trainer(package, root, epochs=1, callbacks=[])._checkpoint_connector._hpc_resume_path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("moment", ["written", "complete"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_save_of_a_slurm_job(package: str, kind: str, moment: str, tmp_path: Path) -> None:
    """Lightning takes the digits of any name with hpc_ckpt_ in it for a checkpoint's number."""
    first, second = tmp_path / "hpc_ckpt_1.ckpt", tmp_path / "hpc_ckpt_2.ckpt"
    killed_by_itself(
        """
        import os, signal, sys, threading, torch
        from ptsave.integrations import checkpoint_io
        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        def kill_while_writing():
            while not any(files for _, _, files in os.walk(folder) if files != ["hpc_ckpt_1.ckpt"]):
                pass
            kill()
        kind, moment, first, second = sys.argv[1:]
        folder = os.path.dirname(first)
        io = getattr(checkpoint_io, kind)()
        io.save_checkpoint({"n": 1}, first)
        io.teardown()
        if moment == "written":
            threading.Thread(target=kill_while_writing, daemon=True).start()
        else:
            os.replace = kill
        io.save_checkpoint({"n": 2, "w": torch.ones(1 << 26)}, second)
        io.teardown()
        """,
        kind,
        moment,
        first,
        second,
    )
    assert len(os.listdir(tmp_path)) == 2
    assert _resumed_from(package, tmp_path) == str(first)
    io = plug_in(package, kind)
    io.save_checkpoint({"n": 2}, second)
    assert io.load_checkpoint(second) == {"n": 2}
    assert sorted(os.listdir(tmp_path)) == [first.name, second.name]
    assert _resumed_from(package, tmp_path) == str(second)


def test_checkpoints_of_a_slurm_job(io: Any, tmp_path: Path) -> None:
    path, link = tmp_path / "hpc_ckpt_3.ckpt", tmp_path / "hpc_ckpt_4.ckpt"
    for number in range(3):  # one after another is unfinished
        io.save_checkpoint({"n": number}, path)
    assert io.load_checkpoint(path) == {"n": 2}
    path.chmod(0o640)
    link.symlink_to(path)
    io.save_checkpoint({"n": 3}, f"file://{link}")
    assert io.load_checkpoint(path) == {"n": 3}
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    (tmp_path / "hpc_ckpt_5.ckpt").mkdir()
    with pytest.raises(IsADirectoryError):
        io.save_checkpoint({}, tmp_path / "hpc_ckpt_5.ckpt")
    with pytest.raises((AttributeError, pickle.PicklingError)):  # by version of Python
        io.save_checkpoint({"n": lambda: 0}, tmp_path / "hpc_ckpt_6.ckpt")
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == [f"hpc_ckpt_{number}.ckpt" for number in (3, 4, 5)]


def test_slurm_job_in_a_process_that_forks(gate: Any, tmp_path: Path) -> None:
    """A child, whose saves have failed, leaves the parent's file alone."""
    io, path = AsyncCheckpointIO(), tmp_path / "hpc_ckpt_1.ckpt"
    io.save_checkpoint({"n": 1}, path)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    gate.set()
    assert io.load_checkpoint(path) == {"n": 1}


def test_slurm_job_beside_another(gate: Any, tmp_path: Path) -> None:
    """Only directories of dead processes are leftovers."""
    first, second = AsyncCheckpointIO(), CheckpointIO()
    first.save_checkpoint({"n": 1}, tmp_path / "hpc_ckpt_1.ckpt")
    second.save_checkpoint({"n": 2}, tmp_path / "hpc_ckpt_2.ckpt")
    assert len(os.listdir(tmp_path)) == 2
    gate.set()
    assert first.load_checkpoint(tmp_path / "hpc_ckpt_1.ckpt") == {"n": 1}
    assert sorted(os.listdir(tmp_path)) == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]


def test_worker_that_outlives_a_job_keeps_no_leftover(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"hpc_ckpt_{number}.ckpt") for number in (1, 2)]
    place = StagedFile(paths[0], paths[0])
    source, sink = os.pipe()
    worker = Child(lambda: (os.write(sink, b"!"), threading.Event().wait()))
    try:
        os.read(source, 1)  # it runs
        place.close()  # as the end of its process does
        StagedFile(paths[1], paths[1]).discard()
        assert os.listdir(tmp_path) == []
    finally:
        worker.kill()
        os.close(source)
        os.close(sink)
