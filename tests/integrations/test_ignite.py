"""ignite's checkpoints by ptsave's save handlers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ptsave
from ptsave.integrations import ignite as integration

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("SaveHandler", "AsyncSaveHandler")


@pytest.fixture(scope="module")
def ignite() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ignite", reason="pip install pytorch-ignite")
        import ignite.engine
        import ignite.handlers

        yield ignite


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
    assert isinstance(handler, ignite.handlers.checkpoint.BaseSaveHandler)
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


def test_errors_of_the_background(ignite: Any, tmp_path: Path) -> None:
    handler = integration.AsyncSaveHandler(tmp_path / "gone")
    handler({"a": 1}, "first.pt")
    handler.wait()
    (tmp_path / "gone" / "second.pt").mkdir()
    with pytest.raises(IsADirectoryError):
        handler({"a": 1}, "second.pt")
