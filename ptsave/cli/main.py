"""The group that the commands belong to, and where it is started."""

from __future__ import annotations

import importlib

import click

import ptsave

__all__ = ["commands", "main"]

# A command, and the module of this package that has it.
_MODULES: dict[str, str] = {
    "convert": "convert",
    "compact": "compact",
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
    r"""Look into, check, convert and compare PyTorch checkpoints.

    \b
    Each command has examples: ptsave COMMAND --help
    """


def main() -> None:
    """Run the command line."""
    commands(prog_name="ptsave")
