"""``ptsave globals``: lists the functions and classes that a checkpoint needs."""

from __future__ import annotations

import io
import json
from typing import Any

import click

from ptsave.cli.arguments import SOURCE, with_storage_options
from ptsave.cli.command import NEGATIVE, Command, with_json
from ptsave.cli.terminal import terminal
from ptsave.contents.directories import find_files
from ptsave.contents.outline import plain_pickle
from ptsave.inspection.pickle_globals import ORDINARY_GLOBALS, globals_in_pickle
from ptsave.support.text import count_text, printable

_EXAMPLES = """
ptsave globals checkpoint.pt
ptsave globals --all checkpoint.pt  # those that torch allows by default, too
ptsave globals - < checkpoint.pt
"""
_ALLOWED, _NOT, _NEVER = "allowed", "not allowed", "never allowed"
_COLORS = {_ALLOWED: "green", _NOT: "yellow", _NEVER: "red"}
_WARNING = """
Loading calls these functions and classes, so a malicious file can do harm with them.
Allow them only if you know what each one does, and trust the author of the file:
"""


@click.command("globals", cls=Command, examples=_EXAMPLES)
@click.argument("file", type=SOURCE)
@click.option("--all", "show_all", is_flag=True, help="Show those that are allowed, too.")
@with_json
@with_storage_options("FILE")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    file: str,
    show_all: bool,
    as_json: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Say which functions and classes FILE needs beyond torch's default allow-list.

    Nothing of the file is run. Exits with 1 if there are any: torch.load with weights_only=True
    refuses such a file until they are allowed.

    With --json: an object with path and globals, a list of objects with name (the full one) and
    state: "allowed", "not allowed" or "never allowed". All are listed.
    """
    ordinary = _ordinary_globals(file, storage_options)
    possible: dict[str, Any] = {}
    if ordinary is not None:
        states = dict.fromkeys(sorted(ordinary), _ALLOWED)
    else:
        from ptsave.inspection.required_globals import (
            code_to_allow,
            never_allowed,
            required_globals,
            unsafe_globals,
        )

        modules = required_globals(file, storage_options=storage_options)
        unsafe = unsafe_globals(modules)
        possible = {name: modules[name] for name in unsafe if not never_allowed(modules[name])}
        states = dict.fromkeys(sorted(modules.keys() - set(unsafe)), _ALLOWED)
        states |= {name: _NOT if name in possible else _NEVER for name in unsafe}
    code = 0 if {*states.values()} <= {_ALLOWED} else NEGATIVE
    if as_json:
        found = [{"name": name, "state": state} for name, state in states.items()]
        click.echo(json.dumps({"path": file, "globals": found}))
        ctx.exit(code)
    for name, state in states.items():
        if show_all or state != _ALLOWED:
            label = terminal().paint(state.ljust(len(_NEVER)), _COLORS[state])
            click.echo(f"{label}  {printable(name)}")
    if not code:
        click.echo(f"Nothing beyond the allow-list ({count_text(len(states), 'global')}).")
    if possible:
        click.echo(_WARNING)
        for line in code_to_allow(possible).splitlines():
            click.echo(f"    {printable(line)}")
    ctx.exit(code)


def _ordinary_globals(file: str, storage_options: dict[str, Any] | None) -> set[str] | None:
    """Return the globals if all are ordinary, else None; this does not import torch."""
    found: set[str] = set()
    for source in find_files(file, storage_options).open():
        if source.kind == "safetensors":
            continue
        data = plain_pickle(source)
        if data is None:
            return None
        found |= globals_in_pickle(io.BytesIO(data), source.name).keys()
        source.close()
    return found if found <= ORDINARY_GLOBALS else None
