"""Text of commands fits the terminal, and has colours where the user has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from command_line import run

from ptsave.support.text import n_columns

_NAMES = [f"model.layers.{i}.self_attention.query_projection.weight" for i in range(12)]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shared = torch.ones(4096, 512, dtype=torch.bfloat16)
    model = dict.fromkeys(_NAMES[:2], shared) | {name: torch.ones(7) for name in _NAMES[2:]}
    torch.save({"model": model, "日本語" * 20: shared, "text": "x" * 200}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize("columns", [24, 40, 80, 120])
@pytest.mark.parametrize("arguments", [(), ("--sort", "size"), ("--stats",)], ids=str)
def test_lines_fit(path: Path, arguments: tuple[str, ...], columns: int) -> None:
    text = run("ls", path, *arguments, COLUMNS=str(columns)).stdout
    table = text.split("\n\n")[0].splitlines()
    assert max(map(n_columns, table)) <= columns
    assert len(table) >= 13


def test_long_names_keep_both_ends(path: Path) -> None:
    lines = run("ls", path, COLUMNS="80").stdout.splitlines()
    assert len({line.split()[0] for line in lines[1:13]}) == 12
    assert all(".weight  " in line for line in lines[1:13])
    assert lines[1].endswith("4.00 MiB")
    assert run("ls", path, COLUMNS="250").stdout.splitlines()[1].endswith("and 1 more")


def test_nothing_is_cut_in_a_file(path: Path) -> None:
    text = run("ls", path).stdout
    assert all(name in text for name in [*_NAMES, "日本語" * 20])
    assert f"shared with model.{_NAMES[1]} and 1 more" in text


COLOURED: list[Callable[[Path], Result]] = [
    lambda path: run("ls", path),
    lambda path: run("ls", path, "--stats"),
    lambda path: run("verify", path),
    lambda path: run("globals", "--all", path),
    lambda path: run("diff", path, path.with_name("b.pt")),
    lambda path: run("verify", path.with_name("none.pt")),
]


@pytest.mark.parametrize("command", COLOURED)
def test_colours(
    path: Path, command: Callable[[Path], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"other": 1}, path.with_name("b.pt"))
    plain = command(path).output
    assert "\x1b" not in plain  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = command(path).output
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "")  # counts as not set
    assert command(path).output == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert command(path).output == plain


def test_a_terminal_without_colours(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptsave.cli.terminal import colors_by_environment, terminal

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert (colors_by_environment(), terminal().has_colors) == (None, True)
    monkeypatch.setenv("TERM", "dumb")
    assert (colors_by_environment(), terminal().has_colors) == (False, False)


def test_json_has_no_colours(path: Path) -> None:
    for command in ("ls", "verify", "globals"):
        assert "\x1b" not in run(command, "--json", path, FORCE_COLOR="1").stdout


def test_totals_are_those_of_the_list(path: Path) -> None:
    assert run("ls", path).stdout.splitlines()[-1].startswith("13 tensors, 12.0 MiB; 11 storages")
    last = run("ls", path, f"model.{_NAMES[0]}", f"model.{_NAMES[2]}").stdout.splitlines()[-1]
    assert last == "2 tensors, 4.00 MiB; 2 storages, 4.00 MiB; of 13 tensors; file: 4.00 MiB"
    statistics = run("ls", path, "--stats", f"model.{_NAMES[2]}").stdout.splitlines()[-1]
    assert statistics.startswith("1 tensor, 28 B; 1 storage, 28 B; of 13 tensors; ")
    assert run("ls", path, "text").stdout.splitlines()[-1].startswith("0 tensors, 0 B; ")
