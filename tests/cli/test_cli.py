"""The command line as a whole: how it is started, and what all commands have in common."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from _corruption import flip
from click.testing import CliRunner, Result
from command_line import fail, json_of, run, run_process
from stock_comparison import Calls, save_without_checksums, stock_load

import ptsave
from ptsave.cli.commands import FAILED, Command, commands, note
from ptsave.support.text import n_columns


def test_module_and_version() -> None:
    assert run_process("--version").stdout == f"ptsave, version {ptsave.__version__}\n"


@pytest.fixture
def failing() -> click.Command:
    @click.command("failing", cls=Command, examples="ptsave failing  # always")
    @click.argument("kind", default="none")
    @click.pass_context
    def command(ctx: click.Context, kind: str) -> None:
        """Fail."""
        note(ctx, "about to fail")
        errors = {
            "os": FileNotFoundError(2, "No such file or directory", "here.pt"),
            "lines": RuntimeError("first\n  second"),
            "empty": MemoryError(),
            "interrupt": KeyboardInterrupt(),
            "frames": RuntimeError("wrong size\nException raised from f at g.cpp:1\nframe #0"),
            "escapes": RuntimeError("no entry \x1b[31m"),
        }
        if kind in errors:
            raise errors[kind]

    return command


@pytest.mark.parametrize(
    ("kind", "message", "code"),
    [
        ("os", "here.pt: No such file or directory", 2),
        ("lines", "first second", 2),
        ("empty", "MemoryError", 2),
        ("frames", "wrong size", 2),
        ("escapes", "no entry \\x1b[31m", 2),
        ("interrupt", "interrupted", 130),
    ],
)
def test_errors_are_one_line(failing: click.Command, kind: str, message: str, code: int) -> None:
    result = CliRunner().invoke(failing, [kind, "--quiet"])
    assert (result.exit_code, result.stderr) == (code, f"ptsave: {message}\n")


def test_debug_shows_where(failing: click.Command) -> None:
    result = CliRunner().invoke(failing, ["lines", "--debug"])
    assert result.exit_code == FAILED
    assert "Traceback" in result.stderr
    assert "RuntimeError: first" in result.stderr


def test_remarks_and_quiet(failing: click.Command) -> None:
    assert CliRunner().invoke(failing).stderr == "ptsave: about to fail\n"
    assert CliRunner().invoke(failing, ["-q"]).stderr == ""


def test_help_has_examples(failing: click.Command) -> None:
    text = CliRunner().invoke(failing, ["--help"]).stdout
    assert text.endswith("Examples:\n  ptsave failing  # always\n")


def test_refusal_of_weights_only_is_short(tmp_path: Path) -> None:
    """torch's own message is a page, of which the advice is for programs."""
    old = {"_use_new_zipfile_serialization": False}  # of which torch's loader makes the object
    torch.save({"where": tmp_path}, tmp_path / "file.pt", **old)
    torch.save([Calls(os.getcwd)], tmp_path / "never.pt", **old)
    path_type = f"{type(tmp_path).__module__}.PosixPath"  # pathlib._local's from Python 3.13 on
    for name, needed in (("file.pt", path_type), ("never.pt", "posix.getcwd")):
        message = fail("ls", tmp_path / name)
        assert f"allows: {needed} (`ptsave globals FILE`" in message
        assert len(message.replace(str(tmp_path), "")) < 200


def test_warnings_are_remarks(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    save_without_checksums([torch.eye(3).to_sparse()], path)  # which is loaded as a whole
    result = run_process("ls", path)
    assert result.stderr.startswith(f"ptsave: {path} was written without checksums")
    assert len(result.stderr.splitlines()) == 1
    assert run_process("ls", path, "--quiet").stderr == ""


def test_interrupt(tmp_path: Path) -> None:
    """While the command waits for a pipe that nobody empties."""
    torch.save(torch.zeros(1 << 20), tmp_path / "file.pt")
    command = [sys.executable, "-m", "ptsave", "extract", str(tmp_path / "file.pt"), "", "-o", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [], 60)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"ptsave: interrupted\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_PTSAVE_COMPLETE" in result.stdout


# --------------------------------------------------------------------------------------------- json


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    big = torch.arange(10_000.0)
    torch.save({"model": {"a": big[:10], "b": torch.ones(3)}, "epoch": 3}, "a.pt")
    return tmp_path / "a.pt"


def test_every_command_that_answers_has_it() -> None:
    for name in set(commands.list_commands(None)) - {"run", "completion"}:  # type: ignore[arg-type]
        text = run(name, "--help").stdout
        assert "--json" in text, name


def test_ls_has_totals_of_the_list(path: Path) -> None:
    found = json_of("ls", path, "model.b")
    sums = {"tensors": 1, "tensor_nbytes": 12, "storages": 1, "storage_nbytes": 12}
    assert found["listed"] == sums
    assert found["totals"]["tensors"] == 2
    whole = json_of("ls", path)
    assert whole["listed"].items() <= whole["totals"].items()
    folder = path.with_name("folder")
    json_of("convert", path, folder, "--drop")
    assert json_of("ls", folder, "model.b")["listed"] == sums


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ls_of_nested_tensors(path: Path) -> None:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    layouts = (torch.strided, torch.jagged)
    torch.save([torch.nested.nested_tensor(parts, layout=each) for each in layouts], path)
    for tensor in json_of("ls", path)["tensors"]:
        assert (tensor["shape"], tensor["stride"], tensor["nbytes"]) == ([2, -1, 3], None, 72)


def test_verify(path: Path) -> None:
    assert json_of("verify", path) == {
        "whole": True,
        "arguments": [
            {
                "path": str(path),
                "files": [
                    {
                        "path": str(path),
                        "state": "whole",
                        "unfinished": False,
                        "nbytes": path.stat().st_size,
                        "records": 8,
                        "tensors": 2,
                        "readable": None,
                        "problems": [],
                        "remarks": [],
                        "error": None,
                    }
                ],
                "problems": [],
                "not_looked_at": [],
                "error": None,
            }
        ],
    }


def test_verify_of_damage_and_of_nothing(path: Path) -> None:
    flip(path, torch.ones(3).numpy().tobytes())
    found = json_of("verify", path, code=1)
    assert not found["whole"]
    (file,) = found["arguments"][0]["files"]
    assert (file["state"], file["readable"]) == ("damaged", ["model.a"])
    (problem,) = file["problems"]
    assert (problem["record"], problem["entries"]) == ("data/1", ["model.b"])
    both = json_of("verify", "none.pt", path, code=2)
    assert [each["path"] for each in both["arguments"]] == ["none.pt", str(path)]
    assert both["arguments"][0]["error"] == "none.pt: No such file or directory"
    (path.parent / "notes.txt").write_text("text")
    folder = json_of("verify", path.parent, code=1)["arguments"][0]
    assert folder["not_looked_at"] == ["notes.txt"]


def test_globals(path: Path) -> None:
    found = json_of("globals", path)
    assert {each["state"] for each in found["globals"]} == {"allowed"}
    torch.save({"where": path}, path)
    found = json_of("globals", path, code=1)
    states = {each["name"]: each["state"] for each in found["globals"]}
    assert next(state for name, state in states.items() if "Path" in name) == "not allowed"


def test_extract(path: Path) -> None:
    found = json_of("extract", path, "model", "epoch", "-o", "some.pt")
    assert found.pop("entries") == ["model", "epoch"]
    assert found == {"path": "some.pt", "tensors": 2, "values": 1, "nbytes": 52}
    assert [*stock_load("some.pt")] == ["model", "epoch"]
    assert "cannot both" in fail("extract", path, "model", "-o", "-", "--json")


def test_convert_and_compact(path: Path) -> None:
    found = json_of("convert", path, "b.safetensors", "--drop")
    assert (found["path"], found["tensors"]) == ("b.safetensors", 2)
    assert found["nbytes"] == Path("b.safetensors").stat().st_size
    assert any("epoch" in remark for remark in found["remarks"])
    found = json_of("compact", path, "--dry-run")
    assert (found["tensors"], found["storages"], found["written"]) == (2, 1, False)
    found = json_of("compact", path, "-o", "small.pt")
    assert found["written"]
    assert found["nbytes"] == Path("small.pt").stat().st_size < found["nbytes_before"]


# ----------------------------------------------------------------------------------------- terminal


_NAMES = [f"model.layers.{i}.self_attention.query_projection.weight" for i in range(12)]


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shared = torch.ones(4096, 512, dtype=torch.bfloat16)
    model = dict.fromkeys(_NAMES[:2], shared) | {name: torch.ones(7) for name in _NAMES[2:]}
    torch.save({"model": model, "日本語" * 20: shared, "text": "x" * 200}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize("columns", [24, 40, 80, 120])
@pytest.mark.parametrize("arguments", [(), ("--sort", "size"), ("--stats",)], ids=str)
def test_lines_fit(wide: Path, arguments: tuple[str, ...], columns: int) -> None:
    text = run("ls", wide, *arguments, COLUMNS=str(columns)).stdout
    table = text.split("\n\n")[0].splitlines()
    assert max(map(n_columns, table)) <= columns
    assert len(table) >= 13


def test_long_names_keep_both_ends(wide: Path) -> None:
    lines = run("ls", wide, COLUMNS="80").stdout.splitlines()
    assert len({line.split()[0] for line in lines[1:13]}) == 12
    assert all(".weight  " in line for line in lines[1:13])
    assert lines[1].endswith("4.00 MiB")
    assert run("ls", wide, COLUMNS="250").stdout.splitlines()[1].endswith("and 1 more")


def test_nothing_is_cut_in_a_file(wide: Path) -> None:
    text = run("ls", wide).stdout
    assert all(name in text for name in [*_NAMES, "日本語" * 20])
    assert f"shared with model.{_NAMES[1]} and 1 more" in text


COLOURED: list[Callable[[Path], Result]] = [
    lambda wide: run("ls", wide),
    lambda wide: run("ls", wide, "--stats"),
    lambda wide: run("verify", wide),
    lambda wide: run("globals", "--all", wide),
    lambda wide: run("diff", wide, wide.with_name("b.pt")),
    lambda wide: run("verify", wide.with_name("none.pt")),
]


@pytest.mark.parametrize("command", COLOURED)
def test_colours(
    wide: Path, command: Callable[[Path], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"other": 1}, wide.with_name("b.pt"))
    plain = command(wide).output
    assert "\x1b" not in plain  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = command(wide).output
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "")  # counts as not set
    assert command(wide).output == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert command(wide).output == plain


def test_a_terminal_without_colours(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptsave.cli.terminal import colors_by_environment, terminal

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert (colors_by_environment(), terminal().has_colors) == (None, True)
    monkeypatch.setenv("TERM", "dumb")
    assert (colors_by_environment(), terminal().has_colors) == (False, False)


def test_json_has_no_colours(wide: Path) -> None:
    for command in ("ls", "verify", "globals"):
        assert "\x1b" not in run(command, "--json", wide, FORCE_COLOR="1").stdout


def test_totals_are_those_of_the_list(wide: Path) -> None:
    assert run("ls", wide).stdout.splitlines()[-1].startswith("13 tensors, 12.0 MiB; 11 storages")
    last = run("ls", wide, f"model.{_NAMES[0]}", f"model.{_NAMES[2]}").stdout.splitlines()[-1]
    assert last == "2 tensors, 4.00 MiB; 2 storages, 4.00 MiB; of 13 tensors; file: 4.00 MiB"
    statistics = run("ls", wide, "--stats", f"model.{_NAMES[2]}").stdout.splitlines()[-1]
    assert statistics.startswith("1 tensor, 28 B; 1 storage, 28 B; of 13 tensors; ")
    assert run("ls", wide, "text").stdout.splitlines()[-1].startswith("0 tensors, 0 B; ")
