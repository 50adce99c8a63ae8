"""The contract of DeepSpeed's checkpoint engines, over its interface or a copy of that."""

from __future__ import annotations

import abc
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _corruption import flip_middle

import ptsave
from ptsave.integrations import deepspeed as integration

_PATH = "deepspeed.runtime.checkpoint_engine.checkpoint_engine"


@dataclass
class CommitInfo:
    """As DeepSpeed's CheckpointCommitInfo."""

    tag: str
    save_dir: str
    save_latest: bool


class Interface(abc.ABC):
    """The methods of DeepSpeed's CheckpointEngine, 0.19.8."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abc.abstractmethod
    def create(self, info: CommitInfo) -> Any: ...
    @abc.abstractmethod
    def save(self, state_dict: Any, path: str) -> Any: ...
    @abc.abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any: ...
    @abc.abstractmethod
    def commit(self, info: CommitInfo) -> Any: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def get_commit_info(self) -> Any:
        return None

    def cleanup(self) -> None:  # noqa: B027 - as there
        """Nothing."""

    def preserves_storage_sharing(self) -> bool:
        return True


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    try:
        importlib.import_module(_PATH)
    except ImportError:
        names = _PATH.split(".")
        for end in range(1, len(names) + 1):
            monkeypatch.setitem(
                sys.modules, ".".join(names[:end]), ModuleType(".".join(names[:end]))
            )
        vars(sys.modules[_PATH])["CheckpointEngine"] = Interface
    yield integration.CheckpointEngine
    vars(integration).pop("CheckpointEngine", None)


@pytest.fixture(params=[False, True], ids=["blocking", "background"])
def engine(request: pytest.FixtureRequest, engine_class: Any) -> Any:
    return engine_class(None, in_background=request.param)


def save_as_deepspeed(engine: Any, folder: Path, tag: str, states: dict[str, Any]) -> bool:
    """Make the calls of DeepSpeedEngine.save_checkpoint, and of a decoupled one's next step."""
    engine.makedirs(str(folder), exist_ok=True)
    info = CommitInfo(tag=tag, save_dir=str(folder), save_latest=True)
    engine.create(info)
    engine.makedirs(str(folder / tag), exist_ok=True)
    for name, state in states.items():
        engine.save(state_dict=state, path=str(folder / tag / name))
    if engine.is_decoupled():
        info = engine.get_commit_info()
        assert info.tag == tag
    done: bool = engine.commit(info)
    assert engine.get_commit_info() is None
    return done


def test_saves_and_loads(engine: Any, tmp_path: Path) -> None:
    states = {
        "mp_rank_00_model_states.pt": {"module": {"w": torch.randn(5, 3)}, "ds_config": {"a": 1}},
        "zero_pp_rank_0_optim_states.pt": {"exp_avg": torch.randn(70), "path": Path("x")},
    }
    assert save_as_deepspeed(engine, tmp_path, "global_step1", states) is True
    for name, state in states.items():
        path = str(tmp_path / "global_step1" / name)
        for key, value in state.items():
            loaded = engine.load(path, map_location=torch.device("cpu"))[key]
            assert type(loaded) is type(value)
            assert str(loaded) == str(value)
    assert engine.name
    assert engine.is_data_parallel_writer(0)
    assert not engine.is_data_parallel_writer(1)
    assert engine.preserves_storage_sharing()
    engine.cleanup()


def test_commit_makes_all_files_durable(
    engine_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(integration, "sync_path", synced.append)
    engine = engine_class()
    save_as_deepspeed(engine, tmp_path, "t", {"a": [1], "b": [2]})
    files = [str(tmp_path / "t" / name) for name in "ab"]
    assert synced == [*files, str(tmp_path), str(tmp_path / "t")]  # a new tag's name, too
    synced.clear()
    save_as_deepspeed(engine_class(fsync=False), tmp_path, "t", {"a": [1]})
    assert synced == []
    seen: list[Any] = []
    real = ptsave.async_save

    def noting(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return real(*args, **options)

    monkeypatch.setattr(integration, "async_save", noting)
    save_as_deepspeed(engine_class(in_background=True), tmp_path, "t", {"a": [1]})
    assert seen == [{"fsync": True}]
    assert synced == [str(tmp_path), str(tmp_path / "t")]


def test_a_failed_file_fails_the_commit(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ptsave.SaveError):
        save_as_deepspeed(engine, tmp_path, "t", {"a": [1], "no/such/folder": [2]})
    # The next checkpoint begins afresh.
    assert save_as_deepspeed(engine, tmp_path, "u", {"a": [1]})


def test_damaged_file(engine: Any, tmp_path: Path) -> None:
    save_as_deepspeed(engine, tmp_path, "t", {"a": {"w": torch.ones(1000)}})
    flip_middle(tmp_path / "t" / "a", "data/0")
    with pytest.raises(ptsave.CorruptCheckpointError):
        engine.load(str(tmp_path / "t" / "a"))


def test_files_of_deepspeeds_own_engine(engine: Any, tmp_path: Path) -> None:
    """Which writes torch's old format, unless it is told not to."""
    torch.save({"w": torch.ones(3)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert engine.load(str(tmp_path / "old"))["w"].tolist() == [1, 1, 1]


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _PATH, None)
    monkeypatch.delitem(vars(integration), "CheckpointEngine", raising=False)
    with pytest.raises(ImportError, match="pip install deepspeed"):
        _ = integration.CheckpointEngine
