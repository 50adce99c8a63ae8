"""``ptsave delta`` and ``apply``, and the versions in a directory for other commands."""

from __future__ import annotations

import json
import os
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
from ptsave.contents.directories import version_numbers
from ptsave.sources.ranges import Folder, folder_at
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
_DATE = "%Y-%m-%d %H:%M"


def folder_of_versions(path: str, storage_options: dict[str, Any] | None) -> Folder | None:
    """Return a directory that has versions of `ptsave.deltas`; None for others.  No torch."""
    folder = folder_at(path, storage_options)
    return folder if folder is not None and version_numbers(folder.names()) else None


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
    ctx: click.Context, /, *, base: str, new: str, output: str, as_json: bool, **options: Any
) -> None:
    """Write the next version of weights: the bytes that differ between BASE and NEW.

    BASE and NEW are files or directories of weights. BASE has the newest version in DIR; if DIR has
    none, BASE is version 0. The format is that of slime, miles and SGLang.

    With --json: an object with path, number, base, encoding ("overwrite", "xor" or "whole"),
    checksum, folded_from, tensors (how many), nbytes and modified.
    """
    from ptsave.deltas import Publisher
    from ptsave.deltas.versions import newest_in
    from ptsave.models.iterating import iter_weights
    from ptsave.writing.targets import resolve_folder

    root = resolve_folder(output, options["storage_options"])
    publisher = Publisher(output, base, version=newest_in(root) or 0, **options)
    path = publisher.publish(dict(iter_weights(new)))
    found = _facts_of(root, publisher.version)
    if as_json:
        click.echo(json.dumps({"path": path, **found}))
        return
    tensors, size = count_text(found["tensors"], "tensor"), size_text(found["nbytes"])
    result(ctx, f"wrote {path}: {found['encoding']}, {tensors}, {size}")


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


def versions_text(ctx: click.Context, folder: Folder, as_json: bool) -> tuple[str, int]:
    """Return the versions in a directory, and the exit code.  Reports versions that are damaged."""
    code, found = 0, []
    for number in version_numbers(folder.names()):
        try:
            found.append(_facts_of(folder, number))
        except Exception as error:
            report_error(ctx, error)
            code = FAILED
    whole = next((each["nbytes"] for each in found if each["encoding"] == "whole"), 0)
    lines = []
    for each in found:
        number, base, encoding = each["number"], each["base"], each["encoding"]
        change = encoding if base == number else f"{encoding} of {base}"
        tensors, size = count_text(each["tensors"], "tensor"), size_text(each["nbytes"])
        each["ratio"] = each["nbytes"] / whole if whole else None
        ratio = f"{each['ratio']:.1%}" if whole else ""
        date = time.strftime(_DATE, time.localtime(each["modified"])) if each["modified"] else ""
        line = f"{number:6}  {change:18}  {tensors:>13}  {size:>8}  {ratio:>6}  {date}"
        lines.append(line.rstrip())
    text = json.dumps({"path": folder.path, "versions": found}) if as_json else "\n".join(lines)
    return text, code


def _facts_of(folder: Folder, number: int) -> dict[str, Any]:
    """Return the JSON object of a version."""
    from ptsave.deltas.versions import name_of, open_version  # imports torch

    version, patches = open_version(folder, number)
    return {
        **version._asdict(),
        "tensors": len(patches),
        "nbytes": sum(patch.nbytes for patch in patches),
        "modified": None if folder.is_url else os.stat(folder.join(name_of(number))).st_mtime,
    }
