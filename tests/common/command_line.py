"""The ``ptsave`` command, in this process and in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from ptsave.cli.commands import commands


def run(*arguments: object, **variables: str | None) -> Result:
    """Run the command with arguments as text, and with environment variables."""
    return CliRunner().invoke(commands, [*map(str, arguments)], env=variables)


def succeed(*arguments: object, **variables: str | None) -> Result:
    """Run the command, and require that it exits with 0."""
    result = run(*arguments, **variables)
    assert result.exit_code == 0, result.output
    return result


def fail(*arguments: object, **variables: str | None) -> str:
    """Run the command; return its one line of error, or how it should be used."""
    result = run(*arguments, **variables)
    assert (result.exit_code, result.stdout) == (2, "")
    if not result.stderr.startswith("Usage: "):
        assert result.stderr.startswith("ptsave: ")
        assert result.stderr.count("\n") == 1
    return result.stderr


def json_of(*arguments: object, code: int = 0) -> Any:
    """Run the command with ``--json``; return the object of its only line."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def run_process(
    *arguments: object, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command as a process, which must exit with 0; with options for `subprocess.run`."""
    command = [sys.executable, "-m", "ptsave", *map(str, arguments)]
    return subprocess.run(command, check=check, **{"capture_output": True, "text": True, **options})
