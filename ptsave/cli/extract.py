"""``ptsave extract``: writes a part of a checkpoint as a new file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from ptsave.cli.arguments import FILE, SOURCE, complete_names, with_storage_options
from ptsave.cli.command import Command, note, result, with_json, with_recovery, with_trust
from ptsave.errors import CorruptCheckpointError
from ptsave.support.text import count_text, printable, size_text, some_of

_N_SHOWN = 8

_EXAMPLES = """
ptsave extract checkpoint.pt model                     # the state dict alone: model.pt
ptsave extract checkpoint.pt model -o model.safetensors
ptsave extract checkpoint.pt model.embed.weight -o embed.npy
ptsave extract checkpoint.pt epoch optimizer.param_groups -o some.pt
ptsave extract s3://bucket/checkpoint.pt model.head    # reads only that
ptsave extract damaged.pt --whole -o rest.pt           # all that is not damaged
ptsave extract damaged.pt model.embed.weight --no-verify
ptsave extract checkpoint.pt model -o - | ssh host 'cat > model.pt'
"""


@click.command("extract", cls=Command, examples=_EXAMPLES)
@click.argument("file", type=SOURCE)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_names)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="A .pt, .safetensors or .npy file, or - for standard output. Default: NAME.pt, here.",
)
@click.option(
    "--whole",
    is_flag=True,
    help="Instead of NAMEs: every entry that is whole, even of a file that was cut short. Damaged "
    "and missing entries are named.",
)
@click.option("-f", "--force", is_flag=True, help="Replace the file if it is there.")
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Whether to compare checksums; if not, damaged tensors are read as they are.",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    help="The most that tensors may take in a .safetensors or .npy file, which holds expanded ones "
    "in full. Default: 8 times their storages, at least 1GiB.",
)
@with_json
@with_recovery
@with_trust
@with_storage_options("FILE")
@with_storage_options("OUTPUT", "target")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    file: str,
    names: tuple[str, ...],
    output: str | None,
    whole: bool,
    force: bool,
    verify: bool,
    max_size: str | None,
    as_json: bool,
    recover: bool,
    storage_options: dict[str, Any] | None,
    target_storage_options: dict[str, Any] | None,
) -> None:
    """Write entries of FILE to a file of their own.

    NAMEs are as `ptsave ls` shows them, with dots between the levels: tensors, containers such as
    model, or other values. One is written as it is, several as a dict. Nothing else is read. A name
    that may mean several entries is written as Python's tuple: "('a.b', 0)".

    With --json: an object with path, entries (the names), tensors and
    values (how many) and nbytes (of the tensors); with --whole left_out, too.
    """
    if whole is bool(names):
        raise click.UsageError("Names of entries, or --whole for all that are not damaged")
    if whole and output is None:
        raise click.UsageError("--whole needs a name for the file: -o OUT")
    if whole and not verify:
        raise click.UsageError("--whole finds damage by checksums, which --no-verify turns off")
    from ptsave.inspection.extraction import (
        count_entries,
        default_output,
        read_whole,
        write_entries,
    )

    if output is None and len(names) > 1:
        raise click.UsageError("Several entries need a name for the file: -o OUT")
    target = default_output(names[0]) if output is None else output
    if target == "-" and as_json:
        raise click.UsageError("--json and the checkpoint cannot both go to standard output")
    if target == "-" and sys.stdout.isatty():
        raise click.UsageError("A checkpoint cannot be shown on a terminal: -o OUT, or redirect it")
    lost: list[str] = []
    if whole:
        rest, lost = read_whole(file, storage_options=storage_options)
        entries, written = {"": rest}, [*rest]  # a single entry is not wrapped in a dict
    else:
        entries = _read_named(file, names, verify=verify, recover=recover, options=storage_options)
        written = [*entries]
    write_entries(
        entries,
        sys.stdout.buffer if target == "-" else target,
        overwrite=force,
        max_size=max_size,
        storage_options=target_storage_options,
    )
    counts = count_entries(entries)
    if as_json:
        found = {"path": target, "entries": written, **counts._asdict()}
        found |= {"left_out": lost} if whole else {}
        click.echo(json.dumps(found))
        return
    if lost:
        note(ctx, f"left out, as damaged or not built: {some_of(lost, _N_SHOWN)}")
    parts = [count_text(counts.tensors, "tensor")] if counts.tensors else []
    parts += [count_text(counts.values, "value")] if counts.values else []
    parts += [size_text(counts.nbytes)] if counts.tensors else []
    if target != "-":
        result(ctx, f"wrote {printable(target)}: {', '.join(parts) or 'nothing'}")


def _read_named(
    file: str, names: Sequence[str], *, verify: bool, recover: bool, options: Any
) -> dict[str, Any]:
    from ptsave.inspection.extraction import read_entries

    try:
        return read_entries(file, names, verify=verify, recover=recover, storage_options=options)
    except CorruptCheckpointError as error:
        # A record that differs from its checksum; the engine's own findings are other damage.
        if type(error) is CorruptCheckpointError and error.advice and not error.finding:
            words = error.brief.removesuffix(".")
            error.args = (f"{words}, or use --no-verify to read it as it is.",)
        raise
