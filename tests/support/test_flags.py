"""Options of public functions that are True or False, given a word that counts as True."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ptsave

STATE = {"weight": torch.ones(3)}
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "save": (
        lambda file, folder, **options: ptsave.save(STATE, folder / "new.pt", **options),
        ("fsync", "atomic", "weights_only_check"),
    ),
    "async_save": (
        lambda file, folder, **options: ptsave.async_save(STATE, folder / "new.pt", **options),
        ("fsync", "atomic", "weights_only_check"),
    ),
    "ArchiveWriter": (
        lambda file, folder, **options: ptsave.ArchiveWriter(folder / "new.pt", **options),
        ("fsync",),
    ),
    "load": (lambda file, folder, **options: ptsave.load(file, **options), ("verify",)),
    "load_into": (
        lambda file, folder, **options: ptsave.load_into(file, STATE, **options),
        ("verify",),
    ),
    "open": (lambda file, folder, **options: ptsave.open(file, **options), ("verify", "recover")),
    "convert": (
        lambda file, folder, **options: ptsave.convert(file, folder / "n.safetensors", **options),
        ("drop", "force", "fsync", "recover"),
    ),
    "compact": (
        lambda file, folder, **options: ptsave.compact(file, folder / "new.pt", **options),
        ("dry_run", "force", "fsync"),
    ),
}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, (_, options) in FUNCTIONS.items() for option in options],
)
def test_words_are_no_flags(name: str, option: str, tmp_path: Path) -> None:
    """Nothing is written, and the error names the option."""
    file, folder = tmp_path / "old.pt", tmp_path / "new"
    folder.mkdir()
    torch.save(STATE, file)
    with pytest.raises(TypeError, match=rf"^{option} must be True or False, not 'no'$"):
        FUNCTIONS[name][0](file, folder, **{option: "no"})
    assert os.listdir(folder) == []
