"""``ptsave completion``: prints a shell's completion script."""

from __future__ import annotations

import click

from ptsave.cli.command import Command
from ptsave.cli.shells import script_of

_EXAMPLES = """
ptsave completion bash > ~/.ptsave.bash; echo '. ~/.ptsave.bash' >> ~/.bashrc
ptsave completion zsh > ~/.ptsave.zsh; echo '. ~/.ptsave.zsh' >> ~/.zshrc
mkdir -p ~/.config/fish/completions; ptsave completion fish > ~/.config/fish/completions/ptsave.fish
"""


@click.command("completion", cls=Command, examples=_EXAMPLES, short_help="A script for your shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script with which SHELL completes commands, options, files and entries.

    Keep it in a file that the shell reads when it starts, as the examples do.
    """
    click.echo(script_of(shell), nl=False)
