"""Models of mlflow under ``ptsave.installed()``, where mlflow-skinny and pandas are installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from client_checkpoints import names_written_by_the_engine
from torch import nn

import ptsave

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def mlflow() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("mlflow.pytorch")


def test_model_goes_through_the_engine(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide has it; what is loaded is what was saved, with and without ptsave."""
    written = names_written_by_the_engine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(30, 20)
    with ptsave.installed():
        mlflow.save_model(model, str(tmp_path / "model"), serialization_format="pickle")
        again = mlflow.load_model(str(tmp_path / "model"))
    assert written == ["model.pth"]
    stock = mlflow.load_model(str(tmp_path / "model"))
    for loaded in (again, stock):
        assert all(map(torch.equal, loaded.parameters(), model.parameters()))
