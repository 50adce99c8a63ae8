"""Shows the steps of a run in several places, for ``ptsave ls``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ptsave.cli.commands import FAILED, report_error
from ptsave.cli.terminal import terminal
from ptsave.contents.directories import has_manifests
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import Folder, folder_at
from ptsave.support.text import printable, size_text, some_of

if TYPE_CHECKING:
    from ptsave.inspection.runs import RunStep

_N_REASONS = 3


def run_text(
    ctx: click.Context, paths: Sequence[str], options: dict[str, Any] | None, as_json: bool
) -> tuple[str, int] | None:
    """Return the steps in the directories of a run, and the exit code.

    Returns None if the paths are something else.  Reports directories that cannot be listed.
    """
    folders: dict[str, Folder] = {}
    names: list[str] = []
    errors: list[Exception] = []
    for path in paths:
        if not (is_url(path) or os.path.isdir(path)):
            return None
        try:
            is_for_it = is_url(path) or not any(map(is_url, paths))
            folder = folder_at(path, options if is_for_it else None)
            if folder is None:
                return None
            names += folder.names()
            folders[path] = folder
        except Exception as error:
            errors.append(error)
    if not has_manifests(names):
        return None
    from ptsave.inspection.runs import RunDirectory, steps_in  # imports torch

    for each in errors:
        report_error(ctx, each)
    steps = steps_in([RunDirectory.of(*pair) for pair in folders.items()])
    text = json.dumps({"steps": [each._asdict() for each in steps]}) if as_json else _lines(steps)
    return text, FAILED if errors else 0


def _lines(steps: list[RunStep]) -> str:
    """Return a line for each save of a step."""
    n_saves = Counter(each.step for each in steps)
    rows = []
    for step in steps:
        save = f" ({step.save or 'unknown save'})" if n_saves[step.step] > 1 else ""
        places = ", ".join(f"{path} {n}/{step.parts}" for path, n in step.directories.items())
        places += f" [{', '.join(step.elsewhere)}]" if step.elsewhere else ""
        reasons = some_of([*filter(None, [step.absent]), *step.defects], _N_REASONS)
        state = terminal().paint(printable(reasons or "whole"), "yellow" if reasons else "green")
        state += "; protected" if step.protected else "; not protected"
        name = printable(f"step {step.step}{save}")
        rows.append((name, printable(places), size_text(step.nbytes), state))
    a, b, c = (max((len(row[i]) for row in rows), default=0) for i in range(3))
    return "\n".join(f"{row[0]:{a}}  {row[1]:{b}}  {row[2]:>{c}}  {row[3]}" for row in rows)
