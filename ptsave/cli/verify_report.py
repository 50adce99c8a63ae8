"""The report of ``ptsave verify``, which prints findings as text or keeps them for JSON."""

from __future__ import annotations

import json
from typing import Any

import click

from ptsave.cli.command import FAILED, NEGATIVE, note, one_line, report_error
from ptsave.cli.terminal import terminal
from ptsave.cli.verify_json import argument_json, file_json, unreadable_json
from ptsave.cli.verify_text import damage_line, file_lines, rest_line
from ptsave.inspection.findings import Problem, Verification
from ptsave.support.text import printable


class Report:
    """The findings about all arguments, and the exit code; JSON is printed at the end."""

    def __init__(self, ctx: click.Context, list_all: bool, as_json: bool) -> None:
        self._ctx = ctx
        self._list_all = list_all
        self._as_json = as_json
        self._terminal = terminal()
        self._codes = [0]
        self._arguments: list[dict[str, Any]] = []

    def begin(self, path: str) -> dict[str, Any]:
        """Begin with an argument; return its JSON object, to which the other methods add."""
        self._arguments.append(argument_json(path))
        return self._arguments[-1]

    def fail(self, argument: dict[str, Any], error: Exception, path: str | None = None) -> None:
        """Report that an argument, or a file of it, cannot be read."""
        self._codes.append(FAILED)
        report_error(self._ctx, error)
        if path is None:
            argument["error"] = one_line(error)
        else:
            argument["files"].append(unreadable_json(path, one_line(error)))

    def add(self, argument: dict[str, Any], found: Verification) -> None:
        """Report on a file."""
        self._codes.append(NEGATIVE if found.problems else 0)
        if self._as_json:
            argument["files"].append(file_json(found))
            return
        click.echo("\n".join(file_lines(found, self._list_all, self._terminal)))
        for remark in found.remarks:
            note(self._ctx, f"{printable(found.path)}: {printable(remark)}")

    def add_problems(self, argument: dict[str, Any], path: str, problems: list[Problem]) -> None:
        """Report files that are inconsistent with each other."""
        for problem in problems:
            self._codes.append(NEGATIVE)
            argument["problems"].append(problem.reason)
            if not self._as_json:
                click.echo(damage_line(path, problem.reason, self._terminal))

    def add_rest(self, argument: dict[str, Any], path: str, names: list[str]) -> None:
        """Report the names that are not verified."""
        argument["not_looked_at"] += names
        if names and not self._as_json:
            click.echo(rest_line(path, names, self._list_all))

    def end(self) -> None:
        """Print the report, and exit."""
        if self._as_json:
            whole = max(self._codes) == 0
            click.echo(json.dumps({"whole": whole, "arguments": self._arguments}))
        self._ctx.exit(max(self._codes))
