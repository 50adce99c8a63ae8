"""``ptsave completion``: prints the script that makes a shell complete the command."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ptsave.cli.command import Command

__all__ = ["command"]

_EXAMPLES = """
ptsave completion bash > ~/.local/share/bash-completion/completions/ptsave
ptsave completion zsh > ~/.ptsave.zsh; echo '. ~/.ptsave.zsh' >> ~/.zshrc
ptsave completion fish > ~/.config/fish/completions/ptsave.fish
"""


@click.command("completion", cls=Command, examples=_EXAMPLES, short_help="A script for your shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options, files and entries.

    Keep it in a file that the shell reads when it starts.
    """
    found = get_completion_class(shell)
    assert found is not None
    group = ctx.find_root().command
    click.echo(found(group, {}, "ptsave", "_PTSAVE_COMPLETE").source())
