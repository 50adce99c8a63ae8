"""``ptsave extract``: a part of a checkpoint as a file of its own."""

from __future__ import annotations

import sys

import click
from click.shell_completion import CompletionItem

from ptsave.cli.command import Command, note
from ptsave.cli.text import printable
from ptsave.errors import CorruptCheckpointError
from ptsave.extracting import default_output, read_entries, write_entries
from ptsave.file_listing import files_at, list_file

__all__ = ["command"]

_EXAMPLES = """
ptsave extract checkpoint.pt model                     # the state dict alone: model.pt
ptsave extract checkpoint.pt model -o model.safetensors
ptsave extract checkpoint.pt model.embed.weight -o embed.npy
ptsave extract checkpoint.pt epoch optimizer.param_groups -o some.pt
ptsave extract s3://bucket/checkpoint.pt model.head    # reads only that
ptsave extract damaged.pt model.embed.weight --no-verify
"""
_MAX_COMPLETIONS = 1000


def _complete_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of entries that begin so, level by level."""
    found: dict[str, None] = {}
    try:
        file = ctx.params["file"]
        shards = files_at(file)
        for path in shards.paths if shards else [file]:
            for node in list_file(path).tree.nodes:
                if node.name.startswith(incomplete) and node.name.isprintable():
                    found[node.name] = None
    except Exception:  # whatever is wrong with the file is said when the command runs
        return []
    return [CompletionItem(name) for name in list(found)[:_MAX_COMPLETIONS]]


@click.command("extract", cls=Command, examples=_EXAMPLES)
@click.argument("file")
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=_complete_names)
@click.option(
    "-o",
    "--output",
    help="A .pt, .safetensors or .npy file, or - for standard output. Default: NAME.pt, here.",
)
@click.option("-f", "--force", is_flag=True, help="Replace the file if it is there.")
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Whether to compare with checksums. Without, damaged tensors are read as they are.",
)
@click.pass_context
def command(
    ctx: click.Context,
    *,
    file: str,
    names: tuple[str, ...],
    output: str | None,
    force: bool,
    verify: bool,
) -> None:
    """Write entries of FILE to a file of their own.

    NAMEs are as `ptsave ls` shows them, with dots between the levels: tensors, containers such as
    model, or other values. One is written as it is, several as a dict. Only what is asked for is
    read. A name that may mean several entries is written as Python's tuple: "('a.b', 0)".
    """
    if output is None and len(names) > 1:
        raise click.UsageError("Several entries need a name for the file: -o OUT")
    target = default_output(names[0]) if output is None else output
    if target == "-" and sys.stdout.isatty():
        raise click.UsageError("A checkpoint is nothing for a terminal: -o OUT, or redirect it")
    try:
        entries = read_entries(file, names, verify=verify)
    except CorruptCheckpointError as error:
        words = str(error).replace("pass verify=False to", "use --no-verify to")
        error.args = (words, *error.args[1:])
        raise
    write_entries(entries, sys.stdout.buffer if target == "-" else target, overwrite=force)
    if output is None:
        note(ctx, f"wrote {printable(target)}")
