"""The group of all commands."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import click
from click.shell_completion import CompletionItem

import ptsave
from ptsave.cli.terminal import colors_by_environment

# Here, so that help and completion import no command's module.
PURPOSES = {
    "ls": "What a file holds.",
    "show": "One entry: a value, or a tensor's numbers.",
    "verify": "Whether files are whole.",
    "globals": "What code a file needs.",
    "extract": "Parts of a file as a new one.",
    "convert": "A file in another format.",
    "compact": "A file without unused bytes.",
    "diff": "How two checkpoints differ.",
    "run": "A program under ptsave.",
    "bench": "How fast your disk is, beside torch.",
    "completion": "A script for your shell.",
}


class _Commands(click.Group):
    """A group that imports a command's module when the command is used."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return super().make_context(*args, **{"color": colors_by_environment(), **kwargs})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*PURPOSES]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in PURPOSES:
            return None
        command = importlib.import_module(f"ptsave.cli.{name}").command
        assert isinstance(command, click.Command)
        # The garbage collector visits all objects, during imports and at exit.  This exempts the
        # many objects of torch's modules.
        gc.freeze()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in PURPOSES and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib

            similar = difflib.get_close_matches(name, PURPOSES, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*PURPOSES.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=purpose)
            for name, purpose in PURPOSES.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ptsave.__version__, prog_name="ptsave")
def commands() -> None:
    """Look into, check, convert and compare PyTorch checkpoints.

    Each command has examples: ptsave COMMAND --help
    """
