"""The group that the commands belong to."""

from __future__ import annotations

import importlib

import click

import ptsave

__all__ = ["commands"]

# A command, and the module of this package that has it.
_MODULES: dict[str, str] = {
    "ls": "ls",
    "verify": "verify",
    "globals": "globals",
    "extract": "extract",
    "convert": "convert",
    "compact": "compact",
    "diff": "diff",
    "run": "run",
    "bench": "bench",
    "completion": "completion",
}


class _Commands(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_MODULES]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _MODULES:
            return None
        module = importlib.import_module(f"ptsave.cli.{_MODULES[name]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ptsave.__version__, prog_name="ptsave")
def commands() -> None:
    """Look into, check, convert and compare PyTorch checkpoints.

    Each command has examples: ptsave COMMAND --help
    """
