"""Runs the code blocks of a page of the documentation, and compares what they print."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from doc_blocks import Block, blocks_of

ROOT = Path(__file__).resolve().parents[2]

# Small programs of every system; anything else has to have a case of its own below.
_SYSTEM = ("cat", "cmp", "cp", "dd", "ls", "mkdir", "mv", "printf", "rm", "truncate")
_FRACTION = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")


class _Interrupts(io.StringIO):
    """An output that interrupts the program when it has printed so many lines."""

    def __init__(self, n_lines: int | None) -> None:
        super().__init__()
        self._n_lines = n_lines

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._n_lines is not None and self.getvalue().count("\n") == self._n_lines:
            self._n_lines = None
            raise KeyboardInterrupt
        return written


class PageRunner:
    """Runs a page in the current directory; `monkeypatch` is for its hidden blocks."""

    def __init__(self, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._page = page
        self._monkeypatch = monkeypatch
        self._namespace: dict[str, Any] = {"__name__": "page", "monkeypatch": monkeypatch}
        self._status = 0

    def run(self) -> None:
        """Run all blocks; the first that fails, or prints something else, ends it."""
        blocks = blocks_of(self._page)
        for number, block in enumerate(blocks):
            following = blocks[number + 1] if number + 1 < len(blocks) else None
            if block.file:
                Path(block.file).write_text(block.text + "\n")
            elif block.kind == "python":
                printed = self._exec(block)
                if following is not None and following.kind == "text":
                    self._compare(following.text, printed, following.line)
            elif block.kind in ("console", "sh"):
                self._commands(block)

    def _exec(self, block: Block) -> str:
        source = "\n" * (block.line - 1) + block.text  # tracebacks have the page's lines
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(source, str(self._page), "exec"), self._namespace)
        return output.getvalue()

    def _commands(self, block: Block) -> None:
        text = re.sub(r"\\\n\s*", "", block.text)
        prompt = "$ " if block.kind == "console" else ""
        command, expected = "", list[str]()
        for line in [*text.splitlines(), prompt]:
            if line.startswith(prompt):
                if command:
                    self._command(command, expected, block)
                command, expected = line.removeprefix(prompt).partition("  # ")[0], []
            else:
                expected.append(line)

    def _command(self, line: str, expected: list[str], block: Block) -> None:
        stop = expected.index("^C") if "^C" in expected else None
        printed, status = self._run(line, stop)
        where = f"{self._page.relative_to(ROOT)}:{block.line}: {line}"
        if stop is not None:
            printed += "\n" if not printed.endswith("\n") else ""
            assert status == "interrupted", where
            expected = expected[:stop]
            status = 130
        refused = any(each.startswith(("Error", "ptsave: ")) for each in expected)
        answered = status == 0 or (line.startswith("ptsave") and status == 1 and expected)
        assert answered or refused or stop is not None, f"{where}: {status}\n{printed}"
        self._status = int(status)
        if expected:
            self._compare("\n".join(expected), printed, block.line)

    def _run(self, line: str, stop: int | None) -> tuple[str, int | str]:
        """Return what a command prints, and its exit status."""
        name, *arguments = shlex.split(line.split(" > ", maxsplit=1)[0], comments=True)
        if " | " in line:
            return self._program(line)
        if name == "ptsave" and arguments[0] != "run":
            from ptsave.cli.commands import commands

            result = CliRunner().invoke(commands, arguments, prog_name="ptsave")
            return result.output, result.exit_code
        if name == "python" and arguments[0].endswith(".py"):
            return self._script(arguments, stop)
        if line == "echo $?":
            return f"{self._status}\n", 0
        if name == "export":
            self._monkeypatch.setenv(*arguments[0].split("="))
            return "", 0
        if line == "python -m ptsave.build_engine":  # takes minutes: tests/engines
            line += " --help"
        if name in ("python", "ptsave", *_SYSTEM):
            return self._program(line)
        self._check_not_run(name, arguments, line)
        return "", 0

    def _script(self, arguments: list[str], stop: int | None) -> tuple[str, int | str]:
        """Run a program of the page in this process, which has imported torch already."""
        output = _Interrupts(stop)
        self._monkeypatch.setattr(sys, "argv", arguments)
        try:
            with contextlib.redirect_stdout(output):
                runpy.run_path(arguments[0], run_name="__main__")
        except KeyboardInterrupt:
            return output.getvalue(), "interrupted"
        return output.getvalue(), 0

    def _program(self, line: str) -> tuple[str, int]:
        """Run a command by the shell; ``python`` and ``ptsave`` are those that run this test."""
        line = re.sub(r"(^|(?<=\| ))ptsave\b", "python -m ptsave", line)
        line = re.sub(r"(^|(?<=\| ))python\b", shlex.quote(sys.executable), line)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            line, shell=True, env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr, done.returncode

    def _check_not_run(self, name: str, arguments: list[str], line: str) -> None:
        """Check a command that a test cannot run, by what it names."""
        if name == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif name == "torchrun":  # tests/documentation/test_examples.py runs it
            script = next(each for each in arguments if each.endswith(".py"))
            assert (ROOT / script).is_file(), line
        elif name == "pip":
            project = (ROOT / "pyproject.toml").read_text()
            for extra in re.findall(r"ptsave\[([\w,-]+)\]", line):
                assert all(f"\n{each} = [" in project for each in extra.split(",")), line
        else:
            raise AssertionError(f"{self._page.relative_to(ROOT)}: no test can run {line!r}")

    def _compare(self, expected: str, printed: str, line: int) -> None:
        expected, printed = (
            "".join(f"{each.rstrip()}\n" for each in text.strip("\n").splitlines())
            for text in (expected, printed)
        )
        printed = _with_numbers_of(expected, printed)
        if not doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
            where = f"{self._page.relative_to(ROOT)}:{line}"
            pytest.fail(f"{where} says\n{expected}\nand this is printed:\n{printed}", pytrace=False)


def _with_numbers_of(expected: str, printed: str) -> str:
    """Return a text with the other's fractions where they differ by little: processors round."""
    wanted, found = _FRACTION.findall(expected), _FRACTION.findall(printed)
    near = len(wanted) == len(found) and all(
        abs(float(a) - float(b)) <= 0.2 * abs(float(a)) for a, b in zip(wanted, found, strict=True)
    )
    replacements = iter(wanted)
    return _FRACTION.sub(lambda _: next(replacements), printed) if near else printed
