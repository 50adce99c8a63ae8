"""The command line as a whole: how it is started, and what all commands have in common."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import ptsave
from ptsave.cli.command import FAILED, Command, note
from ptsave.cli.main import commands


def test_module_and_version() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ptsave", "--version"], check=True, capture_output=True, text=True
    )
    assert result.stdout == f"ptsave, version {ptsave.__version__}\n"


def test_unknown_command() -> None:
    result = CliRunner().invoke(commands, ["lsx"])
    assert result.exit_code == FAILED
    assert "No such command" in result.stderr


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
