"""``ptsave delta`` and ``apply``, and the lists of versions for ``ptsave ls``."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from ptsave.cli.commands import (
    FAILED,
    FILE,
    Command,
    report_error,
    result,
    with_json,
    with_storage_options,
)
from ptsave.cli.terminal import terminal
from ptsave.contents.directories import version_numbers
from ptsave.sources.ranges import folder_at
from ptsave.support.text import count_text, size_text

_DELTA_EXAMPLES = """
ptsave delta base new -o versions            # version 1: base is version 0
ptsave delta new newer -o versions           # version 2
ptsave delta a.safetensors b.safetensors -o s3://bucket/versions --encoding xor
"""
_APPLY_EXAMPLES = """
ptsave apply versions path/to/model          # to the newest version
ptsave apply versions model.safetensors --version 3
ptsave apply s3://bucket/versions path/to/model
"""
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def has_versions(path: str, storage_options: dict[str, Any] | None) -> bool:
    """Return whether a directory has versions of `ptsave.deltas`; imports no torch."""
    folder = folder_at(path, storage_options)
    return folder is not None and bool(version_numbers(folder.names()))


@click.command("delta", cls=Command, examples=_DELTA_EXAMPLES)
@click.argument("base", type=FILE)
@click.argument("new", type=FILE)
@click.option("-o", "--output", type=FILE, required=True, metavar="DIR", help="The directory.")
@click.option(
    "--encoding",
    type=click.Choice(["overwrite", "xor"]),
    default="overwrite",
    help="Positions with new bytes, or old bytes combined with new ones. Default: overwrite.",
)
@click.option(
    "--checksum",
    type=click.Choice(["xxh3-128", "adler32", "blake3"]),
    default="xxh3-128",
    help="The checksum of each new tensor. Default: xxh3-128.",
)
@click.option(
    "--max-depth",
    type=click.IntRange(0),
    default=8,
    help="The most patches in a row; the next version is whole. Default: 8.",
)
@click.option("--fsync", is_flag=True, help="Wait until all data is on the disk.")
@with_json
@with_storage_options("DIR")
@click.pass_context
def delta_command(
    ctx: click.Context,
    /,
    *,
    base: str,
    new: str,
    output: str,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Write the next version of weights: the bytes that differ between BASE and NEW.

    BASE and NEW are files or directories of weights. BASE has the newest version in DIR; if DIR has
    none, BASE is version 0. The format is that of slime, miles and SGLang.

    With --json: an object with path, version, kind ("overwrite", "xor" or "whole"), tensors (how
    many) and nbytes.
    """
    from ptsave.deltas import Publisher
    from ptsave.deltas.versions import newest_in
    from ptsave.inspection.versions import listed
    from ptsave.models.iterating import iter_weights
    from ptsave.writing.targets import resolve_folder

    root = resolve_folder(output, storage_options)
    version = newest_in(root) or 0
    publisher = Publisher(output, base, version=version, storage_options=storage_options, **options)
    path = publisher.publish(dict(iter_weights(new)))
    found = listed(root, publisher.version)
    if as_json:
        facts = {name: getattr(found, name) for name in ("version", "kind", "tensors", "nbytes")}
        click.echo(json.dumps({"path": path, **facts}))
        return
    tensors = count_text(found.tensors, "tensor")
    result(ctx, f"wrote {path}: {found.kind}, {tensors}, {size_text(found.nbytes)}")


@click.command("apply", cls=Command, examples=_APPLY_EXAMPLES)
@click.argument("directory", metavar="DIR", type=FILE)
@click.argument("target", type=FILE)
@click.option("--version", type=click.IntRange(0), help="The version. Default: the newest one.")
@click.option(
    "--base-version",
    type=click.IntRange(0),
    help="The version that TARGET has. Default: the one that was last applied to it; if this is "
    "unknown, checksums show it.",
)
@click.option("--fsync", is_flag=True, help="Wait until all data is on the disk.")
@with_json
@with_storage_options("DIR")
@click.pass_context
def apply_command(
    ctx: click.Context, /, *, directory: str, target: str, as_json: bool, **options: Any
) -> None:
    """Bring the weights in TARGET to a version in DIR.

    TARGET is a safetensors file, or a directory of such files, which are changed in place. If the
    command fails, they have the old bytes. After a kill, the next call first restores them. An
    empty directory gets the newest whole version.

    With --json: an object with path (of TARGET) and version.
    """
    from ptsave.deltas import apply

    version = apply(directory, target, options.pop("version"), **options)
    if as_json:
        click.echo(json.dumps({"path": target, "version": version}))
    else:
        result(ctx, f"{target} has version {version}")


def versions_text(
    ctx: click.Context, path: str, options: dict[str, Any] | None, as_json: bool
) -> tuple[str, int]:
    """Return the versions in a directory, and the exit code.  Reports versions that are damaged."""
    from ptsave.inspection.versions import list_versions
    from ptsave.writing.targets import resolve_folder

    code, found = 0, []
    for each in list_versions(resolve_folder(path, options)):
        if isinstance(each, Exception):
            report_error(ctx, each)
            code = FAILED
        else:
            found.append(each)
    if as_json:
        return json.dumps({"path": path, "versions": [each._asdict() for each in found]}), code
    rows = []
    for each in found:
        base = "whole" if each.base is None else f"{each.kind} of {each.base}"
        ratio = "" if each.ratio is None else f"{each.ratio:.1%}"
        age = "" if each.modified is None else _age(time.time() - each.modified)
        size = size_text(each.nbytes)
        rows.append((f"{each.version}", base, count_text(each.tensors, "tensor"), size, ratio, age))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        base = f"{row[1]:{widths[1]}}"
        cells[1] = terminal().paint(base, bold=True) if row[1] == "whole" else base
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines), code


def _age(seconds: float) -> str:
    number, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{max(seconds, 0) // number:.0f} {unit}"
