"""``ptsave verify``: checks that files are whole, and names the damaged parts."""

from __future__ import annotations

import os
from typing import Any

import click

from ptsave.cli.command import Command, shows_progress, with_json, with_recovery
from ptsave.cli.completing import SOURCE
from ptsave.cli.storage_options import with_storage_options
from ptsave.cli.verify_report import Report
from ptsave.contents.checkpoint_files import CheckpointFiles, checkpoint_files
from ptsave.contents.rank_sets import nbytes_of_ranks
from ptsave.contents.shard_files import ShardFiles
from ptsave.inspection.findings import Problem, Verification, compare_with_index
from ptsave.inspection.whole_files import whole_file
from ptsave.sources.ranges import FsspecFile
from ptsave.sources.urls import is_url
from ptsave.support.progress import ProgressCallback, progress_bar, progress_from

_EXAMPLES = """
ptsave verify checkpoint.pt
ptsave verify --list checkpoint.pt   # names every damaged tensor, and every one that is whole
ptsave verify *.pt && rm -r backup
ptsave verify .run.pt.4f1c0a93b2d7e856.ptsave --recover  # what a killed process has left
ptsave verify path/to/checkpoint-500 # every checkpoint in a directory, shards with their index
ptsave verify --json *.pt | jq -r '.arguments[].files[] | select(.state == "damaged").path'
curl -s https://example.org/model.pt | ptsave verify -
"""


@click.command("verify", cls=Command, examples=_EXAMPLES, short_help="Whether files are whole.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=SOURCE)
@click.option("--list", "list_all", is_flag=True, help="Name all tensors, not only the first few.")
@with_json
@with_recovery
@with_storage_options("a FILE")
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    *,
    list_all: bool,
    as_json: bool,
    recover: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Check that files are whole: every checksum, every size, every place.

    In a directory, every checkpoint is checked, whatever its name: shards with their index, the
    files of all ranks of a distributed checkpoint, and each other file. The command names the files
    that it does not check.

    Exit code: 1 if anything is damaged. The command then prints the damaged records, the tensors
    that use them, and the tensors that are whole. Files without checksums (safetensors, torch
    before 1.6) get the checks that are possible.
    """
    report = Report(ctx, list_all, as_json)
    found = []
    for file in files:
        argument = report.begin(file)
        try:
            checkpoints = checkpoint_files(file, storage_options)
            for each in checkpoints.sets:
                each.close()  # many files would use up the descriptors
            found.append((argument, checkpoints, _sizes_of(checkpoints)))
        except Exception as error:
            report.fail(argument, error)
    nbytes = sum(sum(map(sum, sizes)) for _, _, sizes in found)
    with progress_bar(shows_progress(ctx), "verifying", nbytes, delay=1) as bar:
        done = 0
        for argument, checkpoints, sizes in found:
            _verify_all(report, argument, checkpoints, sizes, recover, progress_from(bar, done))
            done += sum(map(sum, sizes))
    report.end()


def _sizes_of(found: CheckpointFiles) -> list[list[int]]:
    """Return the size of each file of each set; a remote file is asked once."""
    return [[_file_nbytes(files, path) for path in files.paths] for files in found.sets]


def _verify_all(  # noqa: PLR0917
    report: Report,
    argument: dict[str, Any],
    checkpoints: CheckpointFiles,
    sizes: list[list[int]],
    recover: bool,
    progress: ProgressCallback | None,
) -> None:
    """Report the findings about one argument."""
    problems = [Problem(text) for text in checkpoints.problems]
    done = 0
    for files, file_sizes in zip(checkpoints.sets, sizes, strict=True):
        shards = []
        for path, nbytes in zip(files.paths, file_sizes, strict=True):
            try:
                found = _verify(path, files, recover, progress_from(progress, done))
            except Exception as error:
                report.fail(argument, error, path)
            else:
                shards.append(found)
                report.add(argument, found)
            done += nbytes
        problems += compare_with_index(files, shards)
    report.add_problems(argument, checkpoints.path, problems)
    report.add_rest(argument, checkpoints.path, _rest_of(checkpoints))


def _verify(
    path: str, files: ShardFiles, recover: bool, progress: ProgressCallback | None
) -> Verification:
    """Verify one file; a plain and whole one needs no torch, which takes a second to import."""
    found = None if recover else whole_file(path, progress)
    if found is not None:
        return found
    from ptsave.inspection.verification import verify_file

    return verify_file(path, progress, recover=recover, storage_options=files.storage_options)


def _rest_of(files: CheckpointFiles) -> list[str]:
    """Return the names in a directory that are not verified, with reasons."""
    ignored = [f"{name} ({what})" if what else name for name, what in files.ignored.items()]
    return ignored + [f"{name}/" for name in files.directories]


def _file_nbytes(files: ShardFiles, path: str) -> int:
    try:
        if is_url(path):
            return FsspecFile(path, dict(files.storage_options)).nbytes
        return os.stat(path).st_size + nbytes_of_ranks(path)
    except OSError:
        return 0  # reading the file reports the error
