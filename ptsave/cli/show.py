"""``ptsave show``: prints one entry of a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import click

from ptsave.cli.command import Command, with_json, with_recovery, with_trust
from ptsave.cli.completing import SOURCE, complete_names
from ptsave.cli.storage_options import with_storage_options

_EXAMPLES = """
ptsave show checkpoint.pt epoch
ptsave show checkpoint.pt optimizer.param_groups
ptsave show model.safetensors embed.weight     # reads this tensor
ptsave show s3://bucket/checkpoint.pt model.head.bias
ptsave show checkpoints/1000 model.embed.weight --json | jq .statistics.max
ptsave show lightning.ckpt hyper_parameters --trust argparse.Namespace
"""


@click.command(
    "show",
    cls=Command,
    examples=_EXAMPLES,
    short_help="One entry: a value, or a tensor's numbers.",
)
@click.argument("file", type=SOURCE)
@click.argument("name", default="", shell_complete=complete_names)
@with_json
@with_recovery
@with_trust
@with_storage_options("FILE")
def command(
    file: str,
    name: str,
    *,
    as_json: bool,
    recover: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Print one entry of FILE.

    NAME is as `ptsave ls` shows it, with dots between the levels, or Python's tuple of keys:
    "('a.b', 0)". Without it, the whole object is shown.

    Of a tensor: dtype, shape, size, the device it was saved from, its numbers as torch prints them,
    and statistics, of the finite elements. Nothing else is read. A container that holds tensors is
    listed, and none of them is read. An object of a class that is not built is an error, which
    names the class.

    With --json: an object with path, name, type and value; where JSON has no such value it is null,
    and text is Python's. Of a tensor: dtype, shape, nbytes, location, note and statistics, and the
    value of up to 1,000 elements, in which NaN and infinities are null. A container that holds
    tensors is an object as of `ptsave ls --json`.
    """
    from ptsave.cli.shown_entry import shown_entry

    shown = shown_entry(file, name, recover=recover, storage_options=storage_options)
    click.echo(json.dumps(shown.as_json()) if as_json else "\n".join(shown.lines()))
