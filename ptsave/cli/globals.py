"""``ptsave globals``: lists the functions and classes that a checkpoint needs."""

from __future__ import annotations

import io
import json
from typing import Any

import click

from ptsave.cli.command import NEGATIVE, Command, with_json
from ptsave.cli.completing import SOURCE
from ptsave.cli.storage_options import with_storage_options
from ptsave.cli.terminal import terminal
from ptsave.contents.checkpoint_files import find_files
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
Loading builds these by calling them: a file from somebody who wants harm can do harm with them.
Only if you know what each of them does, and trust whoever made the file:
"""


@click.command("globals", cls=Command, examples=_EXAMPLES, short_help="What code a file needs.")
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
    if ordinary is not None:
        if as_json:
            click.echo(_json(file, dict.fromkeys(sorted(ordinary), _ALLOWED)))
            return
        for name in sorted(ordinary) if show_all else ():
            click.echo(_line(_ALLOWED, name))
        click.echo(_nothing(len(ordinary)))
        return
    from ptsave.inspection.required_globals import (
        code_to_allow,
        never_allowed,
        required_globals,
        unsafe_globals,
    )

    modules = required_globals(file, storage_options=storage_options)
    unsafe = unsafe_globals(modules)
    states = dict.fromkeys(sorted(modules.keys() - set(unsafe)), _ALLOWED)
    for name in unsafe:
        states[name] = _NEVER if never_allowed(modules[name]) else _NOT
    if as_json:
        click.echo(_json(file, states))
        ctx.exit(NEGATIVE if unsafe else 0)
    for name, state in states.items():
        if show_all or state != _ALLOWED:
            click.echo(_line(state, name))
    if not unsafe:
        click.echo(_nothing(len(modules)))
        return
    possible = {name: modules[name] for name in unsafe if not never_allowed(modules[name])}
    if possible:
        click.echo(_WARNING)
        for line in code_to_allow(possible).splitlines():
            click.echo(f"    {printable(line)}")
    ctx.exit(NEGATIVE)


def _line(state: str, name: str) -> str:
    return f"{terminal().paint(state.ljust(len(_NEVER)), _COLORS[state])}  {printable(name)}"


def _json(path: str, states: dict[str, str]) -> str:
    found = [{"name": name, "state": state} for name, state in states.items()]
    return json.dumps({"path": path, "globals": found})


def _nothing(n_globals: int) -> str:
    return f"Nothing beyond the allow-list ({count_text(n_globals, 'global')})."


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
