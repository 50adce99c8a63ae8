"""What the tests of other libraries' checkpoints have in common."""

from __future__ import annotations

import copy
import importlib
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import run_warm

from ptsave.writing.targets import FileWriter


def imported(name: str, *needed: str) -> Any:
    """Import a library, or skip the test where it, or what it needs, is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in needed:
            pytest.importorskip(each, reason=f"pip install {each}")
        pytest.importorskip(name.partition(".")[0], reason=f"pip install {name.partition('.')[0]}")
        return importlib.import_module(name)


def assert_same_state(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested dicts of tensors and plain values bit by bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same_state(found[key], value, f"{where}.{key}")
    else:
        assert found == expected, where


def full_state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the whole state of a sharded model, as every rank sees it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True)
    states = get_state_dict(model, optimizer, options=options)
    return copy.deepcopy({"model": states[0], "optimizer": states[1]["state"]})


def assert_written_by_two_ranks(folder: Path) -> None:
    """Require the files of ptsave's StorageWriter on two ranks."""
    names = [path.name for path in folder.glob("*.distcp")]
    assert len(names) == 2
    assert all(re.fullmatch(r"__[01]_[0-9a-f]{16}\.distcp", name) for name in names), names


def names_written_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each file that the engine writes from now on."""
    names: list[str] = []
    write = FileWriter.write_file

    def noting(writer: FileWriter, path: str) -> None:
        names.append(os.path.basename(path))
        write(writer, path)

    monkeypatch.setattr(FileWriter, "write_file", noting)
    return names


def share_of_the_engine(folder: Path, names: list[str]) -> float:
    """Return which share of the bytes in a folder the files of these names have."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    by_engine = sum(path.stat().st_size for path in files if path.name in names)
    return by_engine / sum(path.stat().st_size for path in files)


def killed_by_itself(script: str, *arguments: object) -> None:
    """Run a script that kills its own process."""
    result = run_warm(script, *arguments, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
