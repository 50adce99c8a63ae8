"""ignite's checkpoints by ptsave's save handlers."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from client_checkpoints import imported

import ptsave
from ptsave.integrations import ignite as integration

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("SaveHandler", "AsyncSaveHandler")


@pytest.fixture(scope="module")
def ignite() -> Any:
    imported("ignite.handlers")
    return imported("ignite")


def run(ignite: Any, handler: Any, epochs: int, resume: Path | None = None) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(_: Any, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    engine = ignite.engine.Engine(step)
    parts = {"model": model, "optimizer": optimizer, "engine": engine}
    if handler is not None:
        saver = ignite.handlers.Checkpoint(parts, handler, n_saved=2)
        engine.add_event_handler(ignite.engine.Events.EPOCH_COMPLETED, saver)
    if resume is not None:
        ignite.handlers.Checkpoint.load_objects(parts, ptsave.load(resume))
    generator = torch.Generator().manual_seed(1)
    engine.run([torch.randn(2, 4, generator=generator) for _ in range(3)], max_epochs=epochs)
    if hasattr(handler, "wait"):
        handler.wait()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_exactly(kind: str, ignite: Any, tmp_path: Path) -> None:
    expected = run(ignite, None, 4).state_dict()
    handler = getattr(integration, kind)(tmp_path / "made")
    assert isinstance(handler, ignite.handlers.DiskSaver)
    run(ignite, handler, 3)
    assert sorted(os.listdir(tmp_path / "made")) == ["checkpoint_6.pt", "checkpoint_9.pt"]
    with pytest.raises(ValueError, match="already present"):
        getattr(integration, kind)(tmp_path / "made")
    again = getattr(integration, kind)(tmp_path / "made", require_empty=False)
    resumed = run(ignite, again, 4, tmp_path / "made" / "checkpoint_9.pt").state_dict()
    for key, value in expected.items():
        assert torch.equal(resumed[key], value)


@pytest.mark.parametrize("kind", KINDS)
def test_urls_and_other_ranks(kind: str, ignite: Any, tmp_path: Path) -> None:
    handler = getattr(integration, kind)(f"memory://ignite-{kind}/")
    handler({"a": torch.ones(2)}, "x.pt", {"basename": "x"})
    getattr(handler, "wait", lambda: None)()
    url = f"memory://ignite-{kind}/x.pt"
    assert ptsave.load(url)["a"].tolist() == [1, 1]
    handler.remove("x.pt")
    with pytest.raises(FileNotFoundError):
        ptsave.load(url)
    elsewhere = getattr(integration, kind)(tmp_path, save_on_rank=1)
    elsewhere({"a": 1}, "x.pt")
    elsewhere.remove("x.pt")
    assert os.listdir(tmp_path) == []


def outcome_of_a_run(ignite: Any, make: Any) -> Any:
    """Return all that ignite tells of a handler and its checkpoints, apart from the directory."""
    net = torch.nn.Linear(2, 2)
    engine = ignite.engine.Engine(lambda *_: None)
    handler = make()
    saver = ignite.handlers.Checkpoint(
        {"net": net}, handler, n_saved=2, global_step_transform=lambda engine, _: engine.state.epoch
    )
    engine.add_event_handler(ignite.engine.Events.EPOCH_COMPLETED, saver)
    engine.run([0], 3)
    getattr(handler, "wait", lambda: None)()
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        net.weight.zero_()
    saver.reload_objects({"net": net}, global_step=3, name="net")
    assert torch.equal(net.weight, expected["weight"])
    ignite.handlers.Checkpoint.load_objects({"net": net}, saver.last_checkpoint)
    last = saver.last_checkpoint
    return type(last), last.name, sorted(os.listdir(last.parent)), type(handler.dirname)


@pytest.mark.parametrize("kind", KINDS)
def test_is_a_disk_saver(kind: str, ignite: Any, tmp_path: Path) -> None:
    ours, stock = getattr(integration, kind), ignite.handlers.DiskSaver
    expected = outcome_of_a_run(ignite, lambda: stock(tmp_path / "stock"))
    assert outcome_of_a_run(ignite, lambda: ours(str(tmp_path / "ours"))) == expected
    for number, make in enumerate((ours, stock)):
        run = tmp_path / str(number)
        with pytest.raises(ValueError, match=r"Directory path .* is not found"):
            make(run, create_dir=False)
        handler = make(run, True, True, True, 0, pickle_protocol=4)
        assert run.is_dir()  # made at once
        handler({"a": 1}, "x.pt")
        getattr(handler, "wait", lambda: None)()
        with pytest.raises(ValueError, match="already present"):
            make(run)
        make(run, create_dir=False, require_empty=False)
    assert (tmp_path / "0" / "x.pt").stat().st_mode == (tmp_path / "1" / "x.pt").stat().st_mode
    files = [zipfile.ZipFile(tmp_path / name / "x.pt") for name in ("0", "1")]
    pickles = [
        next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
        for file in files
    ]
    assert pickles[0] == pickles[1]
    assert pickles[0][:2] == b"\x80\x04"


@pytest.mark.parametrize("kind", KINDS)
def test_refused_options(kind: str, ignite: Any, tmp_path: Path) -> None:
    for options, message in (
        ({"fsync": "yes"}, "fsync must be True or False"),
        ({"pickle_protocl": 4}, "unexpected keyword argument 'pickle_protocl'"),
        ({"storage_options": {"key": 1}}, "storage_options"),
    ):
        with pytest.raises(TypeError, match=message):
            getattr(integration, kind)(tmp_path / "run", **options)
    assert os.listdir(tmp_path) == []


def test_last_checkpoint_at_a_url(ignite: Any) -> None:
    handler = integration.SaveHandler("memory://ignite-last/", create_dir=False)
    saver = ignite.handlers.Checkpoint({"net": torch.nn.Linear(2, 2)}, handler)
    saver(ignite.engine.Engine(lambda *_: None))
    assert saver.last_checkpoint == "memory://ignite-last/net_0.pt"
    assert ptsave.load(saver.last_checkpoint)["weight"].shape == (2, 2)


def test_errors_of_the_background(ignite: Any, tmp_path: Path) -> None:
    handler = integration.AsyncSaveHandler(tmp_path / "gone")
    handler({"a": 1}, "first.pt")
    handler.wait()
    (tmp_path / "gone" / "second.pt").mkdir()
    with pytest.raises(IsADirectoryError):
        handler({"a": 1}, "second.pt")
