"""``ptsave globals``: lists the functions and classes that a checkpoint needs."""

from __future__ import annotations

import io
from typing import Any

import click

from ptsave.cli.command import NEGATIVE, Command
from ptsave.cli.completing import FILE
from ptsave.cli.storage_options import with_storage_options
from ptsave.contents.checkpoint_files import find_files
from ptsave.contents.outline import plain_pickle
from ptsave.inspection.pickle_globals import ORDINARY_GLOBALS, globals_in_pickle
from ptsave.support.text import count_text, printable

__all__ = ["command"]

_EXAMPLES = """
ptsave globals checkpoint.pt
ptsave globals --all checkpoint.pt  # those that torch allows by default, too
"""
_WARNING = """
Loading builds these by calling them: a file from somebody who wants harm can do harm with them.
Only if you know what each of them does, and trust whoever made the file:
"""


@click.command("globals", cls=Command, examples=_EXAMPLES, short_help="What code a file needs.")
@click.argument("file", type=FILE)
@click.option("--all", "show_all", is_flag=True, help="Show those that are allowed, too.")
@with_storage_options("FILE")
@click.pass_context
def command(
    ctx: click.Context, file: str, show_all: bool, storage_options: dict[str, Any] | None
) -> None:
    """Say which functions and classes FILE needs beyond torch's default allow-list.

    Nothing of the file is run. Exits with 1 if there are any: torch.load with weights_only=True
    refuses such a file until they are allowed.
    """
    ordinary = _ordinary_globals(file, storage_options)
    if ordinary is not None:
        for name in sorted(ordinary) if show_all else ():
            click.echo(f"allowed        {printable(name)}")
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
    if show_all:
        for name in sorted(modules.keys() - set(unsafe)):
            click.echo(f"allowed        {printable(name)}")
    for name in unsafe:
        kind = "never allowed" if never_allowed(modules[name]) else "not allowed"
        click.echo(f"{kind.ljust(13)}  {printable(name)}")
    if not unsafe:
        click.echo(_nothing(len(modules)))
        return
    possible = {name: modules[name] for name in unsafe if not never_allowed(modules[name])}
    if possible:
        click.echo(_WARNING)
        for line in code_to_allow(possible).splitlines():
            click.echo(f"    {printable(line)}")
    ctx.exit(NEGATIVE)


def _nothing(n_globals: int) -> str:
    return f"Nothing beyond the allow-list ({count_text(n_globals, 'global')})."


def _ordinary_globals(file: str, storage_options: dict[str, Any] | None) -> set[str] | None:
    """Return the globals of a file that has ordinary ones only, which takes no torch to tell."""
    files = find_files(file, storage_options)
    if files.source is None:
        return None
    data = plain_pickle(files.source)
    if data is None:
        return None
    found = globals_in_pickle(io.BytesIO(data), files.source.name).keys()
    return {*found} if found <= ORDINARY_GLOBALS else None
