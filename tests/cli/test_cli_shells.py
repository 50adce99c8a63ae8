"""Completion in real shells of a fresh account, set up as ``ptsave completion --help`` says."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import run

import ptsave

START = {"bash": ["bash", "-i"], "zsh": ["zsh", "-i"], "fish": ["fish", "-i"]}
SECONDS = 20
COMPLETIONS = {
    "ptsave verif": "verify ",
    "ptsave ls --dep": "--depth ",
    "ptsave ls mod": "model.pt ",
    "ptsave ls model.pt layers.s": "layers.second ",
    "ptsave ls a\\ mod": "a\\ model.pt ",
    "ptsave ls a\\ model.pt layers.i": "it\\ is ",
    "ptsave ls 'a model.pt' 'layers.i": "it is' ",
}


@pytest.fixture(scope="module", params=START)
def account(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home of somebody who has run the examples, named after the shell."""
    shell = str(request.param)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    home: Path = tmp_path_factory.mktemp("home") / shell
    home.mkdir()
    program = home / "bin" / "ptsave"
    program.parent.mkdir()
    code = "from ptsave.cli.main import main; main()"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    program.chmod(0o755)
    torch.save({"layers": {"first": torch.ones(2), "it is": torch.ones(1)}}, home / "a model.pt")
    torch.save({"layers": {"first": torch.ones(2), "second": torch.ones(1)}}, home / "model.pt")
    (line,) = [line for line in setups() if f" {shell} " in line]
    subprocess.run(["sh", "-c", line], check=True, env=environment(home), cwd=home)
    return home


def setups() -> list[str]:
    text = run("completion", "--help").stdout
    return [line.strip() for line in text.partition("Examples:")[2].splitlines()]


def environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    root = str(Path(ptsave.__file__).parent.parent)
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {"HOME": str(home), "PATH": path, "TERM": "xterm", "PYTHONPATH": python_path}


class Shell:
    """A shell on a terminal of its own."""

    def __init__(self, home: Path) -> None:
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(home)
            command = START[home.name]
            os.execvpe(command[0], command, environment(home))
        self._shown = ""
        self.type("echo rea''dy\n")
        self.wait_for("ready")

    def type(self, text: str) -> None:
        self._shown = ""
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str) -> None:
        """Fail if the terminal does not show some text in time."""
        end = time.monotonic() + SECONDS
        while text not in self.shown():
            ready, _, _ = select.select([self._terminal], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.shown()!r}"
            self._shown += os.read(self._terminal, 1 << 16).decode(errors="replace")

    def shown(self) -> str:
        """Return what is shown, without what moves the cursor and colours text."""
        return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>]|\][^\a]*\a|\(B)", "", self._shown)

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._pid, 0)


def test_completion(account: Path) -> None:
    shell = Shell(account)
    try:
        for typed, completed in COMPLETIONS.items():
            shell.type(f"{typed}\t\x0c")  # Ctrl-L shows all of the line again
            shell.wait_for(completed)
            shell.type("\x15")  # Ctrl-U empties it
    finally:
        shell.close()
