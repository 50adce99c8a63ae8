"""The command line as a whole: how it is started, and what all commands have in common."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from command_line import fail, run, run_process
from stock_comparison import save_without_checksums

import ptsave
from ptsave.cli.commands import FAILED, Command, note


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
    torch.save([Runs(os.getcwd)], tmp_path / "never.pt", **old)
    path_type = f"{type(tmp_path).__module__}.PosixPath"  # pathlib._local's from Python 3.13 on
    for name, needed in (("file.pt", path_type), ("never.pt", "posix.getcwd")):
        message = fail("ls", tmp_path / name)
        assert f"allows: {needed} (`ptsave globals FILE`" in message
        assert len(message.replace(str(tmp_path), "")) < 200


class Runs:
    def __init__(self, call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call, ()


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
