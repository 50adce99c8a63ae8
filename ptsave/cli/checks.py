"""``ptsave verify`` checks files for damage; ``ptsave globals`` lists the code that they need.

docs/reference/command_line.md documents the output of ``--json``.
"""

from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ptsave.cli.commands import (
    FAILED,
    FILE,
    NEGATIVE,
    SOURCE,
    Command,
    note,
    one_line,
    report_error,
    shows_progress,
    with_json,
    with_recovery,
    with_storage_options,
)
from ptsave.cli.terminal import terminal
from ptsave.cli.versions import folder_of_versions
from ptsave.contents.directories import (
    CheckpointFiles,
    checkpoint_files,
    find_files,
    has_manifests,
    nbytes_of_ranks,
)
from ptsave.contents.files import ShardFiles
from ptsave.contents.outline import plain_pickle
from ptsave.inspection.reports import Problem, Verification, compare_with_index, whole_file
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import FsspecFile, folder_at
from ptsave.support.calls import ProgressCallback, progress_bar, progress_from
from ptsave.support.text import count_text, printable, size_text

if TYPE_CHECKING:
    from ptsave.inspection.runs import RunDirectory

_N_SHOWN = 5
_VERIFY_EXAMPLES = """
ptsave verify checkpoint.pt
ptsave verify --list checkpoint.pt   # names all damaged and all undamaged tensors
ptsave verify *.pt && rm -r backup
ptsave verify .run.pt.4f1c0a93b2d7e856.ptsave --recover  # what a killed process has left
ptsave verify s3://bucket/run /nvme/run  # AsyncCheckpointer(local=...): also the manifests
ptsave verify path/to/checkpoint-500 # every checkpoint in a directory, shards with their index
ptsave verify --json *.pt | jq -r '.arguments[].files[] | select(.state == "damaged").path'
curl -s https://example.org/model.pt | ptsave verify -
"""


@click.command("verify", cls=Command, examples=_VERIFY_EXAMPLES)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=SOURCE)
@click.option("--list", "list_all", is_flag=True, help="Name all tensors, not only the first few.")
@with_json
@click.option("--base", type=FILE, help="The weights that a directory's first version changes.")
@with_recovery
@with_storage_options("a FILE")
@click.pass_context
def verify_command(
    ctx: click.Context,
    files: tuple[str, ...],
    *,
    list_all: bool,
    as_json: bool,
    base: str | None,
    recover: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Check files for damage: every checksum, size and position.

    In a directory, the command checks all checkpoints, whatever their names: shards with their
    index, distributed checkpoints with the files of all ranks, and single files. It names the files
    that it does not check.

    In a directory of AsyncCheckpointer(local=...), the command also compares each file with the
    digest in its manifest, and names the files that have no manifest. A step whose other parts are
    in other directories is named, but is not damaged.

    In a directory of versions (`ptsave delta`), the command checks every index, file, frame and
    position. It compares the results with their checksums behind a whole version, and with --base.

    Exit code: 1 if anything is damaged. The command then prints the damaged records, the tensors
    that use them, and the undamaged tensors. Files without checksums (safetensors, torch before
    1.6) get only the other checks.
    """
    report = _Report(ctx, list_all, as_json)
    found = []
    runs: dict[str, RunDirectory] = {}
    for file in files:
        argument = report.begin(file)
        try:
            is_for_it = is_url(file) or not any(map(is_url, files))
            options = storage_options if is_for_it else None
            if (folder := folder_of_versions(file, options)) is not None:
                from ptsave.inspection.versions import verify_versions

                for version in verify_versions(folder, base):
                    report.add(argument, version)
                continue
            checkpoints = checkpoint_files(file, options)
            for each in checkpoints.sets:
                each.close()  # many open files would use up the descriptors
            # The size of a remote file is fetched only once.
            sizes = {path: _nbytes(each, path) for each in checkpoints.sets for path in each.paths}
            found.append((argument, checkpoints, sizes))
            if has_manifests(checkpoints.ignored):
                runs[file] = _run_in(checkpoints, options)
        except Exception as error:
            argument["error"] = report.fail(error)
    nbytes = sum(sum(sizes.values()) for _, _, sizes in found)
    with progress_bar(shows_progress(ctx), "verifying", nbytes, delay=1) as bar:
        done = 0
        for argument, checkpoints, sizes in found:
            run = runs.get(argument["path"])
            problems = [Problem(text) for text in checkpoints.problems]
            for each in checkpoints.sets:
                shards = []
                for path in each.paths:
                    try:
                        shard = _verify(path, each, recover, progress_from(bar, done))
                        shard = shard if run is None else run.compared(shard)
                    except Exception as error:
                        unreadable = _file_json(Verification(path, []))
                        unreadable |= {"state": "unreadable", "nbytes": None, "records": None}
                        argument["files"].append({**unreadable, "error": report.fail(error)})
                    else:
                        shards.append(shard)
                        report.add(argument, shard)
                    done += sizes[path]
                problems += compare_with_index(each, shards)
            report.add_problems(argument, checkpoints, problems)
    if runs:
        from ptsave.inspection.runs import steps_in

        for step in steps_in(runs.values()):
            if step.absent:
                note(ctx, f"step {step.step}: {step.absent}")
    report.end()


def _run_in(checkpoints: CheckpointFiles, storage_options: dict[str, Any] | None) -> RunDirectory:
    """Return the files of a run in a directory; their manifests then count as looked at."""
    from ptsave.inspection.runs import RunDirectory
    from ptsave.training.directory import MANIFEST

    folder = folder_at(checkpoints.path, storage_options)
    assert folder is not None
    run = RunDirectory.of(checkpoints.path, folder)
    for copy in run.copies.values():
        checkpoints.ignored.pop(copy.file.name + MANIFEST, None)
    return run


def _nbytes(files: ShardFiles, path: str) -> int:
    try:
        if is_url(path):
            return FsspecFile(path, dict(files.storage_options)).nbytes
        return os.stat(path).st_size + nbytes_of_ranks(path)
    except OSError:
        return 0  # reading the file reports the error


def _verify(
    path: str, files: ShardFiles, recover: bool, progress: ProgressCallback | None
) -> Verification:
    """Verify one file; import torch only if necessary, because that takes a second."""
    found = None if recover else whole_file(path, progress)
    if found is not None:
        return found
    from ptsave.inspection.verification import verify_file

    return verify_file(path, progress, recover=recover, storage_options=files.storage_options)


class _Report:
    """Collects the findings about all arguments, and the exit code; `end` prints the JSON."""

    def __init__(self, ctx: click.Context, list_all: bool, as_json: bool) -> None:
        self._ctx = ctx
        self._list_all = list_all
        self._as_json = as_json
        self._terminal = terminal()
        self._code = 0
        self._arguments: list[dict[str, Any]] = []

    def begin(self, path: str) -> dict[str, Any]:
        """Start the report on one argument; return its JSON object, which other methods fill in."""
        self._arguments.append(
            {"path": path, "files": [], "problems": [], "not_looked_at": [], "error": None}
        )
        return self._arguments[-1]

    def fail(self, error: Exception) -> str:
        """Report an argument or file that cannot be read; return the error as one line."""
        self._code = FAILED
        report_error(self._ctx, error)
        return one_line(error)

    def add(self, argument: dict[str, Any], found: Verification) -> None:
        """Print what was found in a file, or add it to the argument's JSON object."""
        if found.problems:
            self._code = max(self._code, NEGATIVE)
        if self._as_json:
            argument["files"].append(_file_json(found))
            return
        click.echo("\n".join(self._file_lines(found)))
        for remark in found.remarks:
            note(self._ctx, f"{printable(found.path)}: {printable(remark)}")

    def add_problems(
        self, argument: dict[str, Any], files: CheckpointFiles, problems: list[Problem]
    ) -> None:
        """Report files that do not fit together, and names of files that were not verified."""
        ignored = [f"{name} ({what})" if what else name for name, what in files.ignored.items()]
        names = ignored + [f"{name}/" for name in files.directories]
        if problems:
            self._code = max(self._code, NEGATIVE)
        argument["problems"] = [problem.reason for problem in problems]
        argument["not_looked_at"] = names
        if self._as_json:
            return
        path = printable(files.path)
        for problem in problems:
            click.echo(f"{path}: {self._damaged()}: {printable(problem.reason)}")
        if names:
            shown, more = self._shown(names)
            more = f" {more}" if more else ""
            click.echo(f"{path}: not looked at: {', '.join(map(printable, shown))}{more}")

    def end(self) -> None:
        """Print the JSON object, and exit."""
        if self._as_json:
            click.echo(json.dumps({"whole": self._code == 0, "arguments": self._arguments}))
        self._ctx.exit(self._code)

    def _file_lines(self, found: Verification) -> Iterator[str]:
        """Yield the lines about one file: its state, and all damage."""
        path = printable(found.path)
        records = [count_text(found.n_records, "record")] if found.n_records else []
        n_tensors = [] if found.tensors is None else [count_text(len(found.tensors), "tensor")]
        facts = ", ".join([*records, *n_tensors, size_text(found.nbytes)])
        if not found.problems:
            state, color = ("whole", "green") if found.has_checksums else ("no checksums", "yellow")
            begin = "unfinished, but " if found.is_unfinished else ""
            yield f"{path}: {begin}{self._terminal.paint(state, color)} ({facts})"
            return
        yield f"{path}: {self._damaged()} ({facts})"
        for problem in found.problems:
            where = "" if problem.record is None else f"record {problem.record}: "
            at = "" if problem.offset is None else f" (at offset {problem.offset})"
            yield f"  {printable(where + problem.reason)}{at}"
            yield from self._name_lines("damaged:", problem.entries)
        if found.whole is None or found.tensors is None:
            return
        yield f"  {len(found.whole):,} of {count_text(len(found.tensors), 'tensor')} can be read"
        if self._list_all:
            yield from self._name_lines("whole:", found.whole)
        if found.whole and (found.n_records or found.is_unfinished):
            path = shlex.quote(printable(found.path))
            yield f"  read them with: ptsave extract {path} --whole -o OUT"

    def _damaged(self) -> str:
        return self._terminal.paint("DAMAGED", "red", bold=True)

    def _name_lines(self, label: str, names: Sequence[str]) -> Iterator[str]:
        shown, more = self._shown(names)
        yield from (f"    {label} {printable(name)}" for name in shown)
        if more:
            yield f"    {label} {more}"

    def _shown(self, names: Sequence[str]) -> tuple[Sequence[str], str]:
        """Return the names to show, and a text about the others."""
        shown = names if self._list_all else names[:_N_SHOWN]
        n_others = len(names) - len(shown)
        return shown, f"and {n_others:,} more (--list shows all)" if n_others else ""


def _file_json(found: Verification) -> dict[str, Any]:
    state = "damaged" if found.problems else "whole" if found.has_checksums else "no checksums"
    return {
        "path": found.path,
        "state": state,
        "unfinished": found.is_unfinished,
        "nbytes": found.nbytes,
        "records": found.n_records,
        "tensors": None if found.tensors is None else len(found.tensors),
        "readable": found.whole if found.problems else None,
        "problems": [asdict(problem) for problem in found.problems],
        "remarks": found.remarks,
        "error": None,
    }


# ------------------------------------------------------------------------------------------ globals

_GLOBALS_EXAMPLES = """
ptsave globals checkpoint.pt
ptsave globals --all checkpoint.pt  # also the ones that torch allows by default
ptsave globals - < checkpoint.pt
"""
_ALLOWED, _NOT, _NEVER = "allowed", "not allowed", "never allowed"
_COLORS = {_ALLOWED: "green", _NOT: "yellow", _NEVER: "red"}
_WARNING = """
Loading calls these functions and classes, so a malicious file can do harm with them.
Allow them only if you know what each one does, and trust the author of the file:
"""


@click.command("globals", cls=Command, examples=_GLOBALS_EXAMPLES)
@click.argument("file", type=SOURCE)
@click.option("--all", "show_all", is_flag=True, help="Also show allowed functions and classes.")
@with_json
@with_storage_options("FILE")
@click.pass_context
def globals_command(
    ctx: click.Context,
    *,
    file: str,
    show_all: bool,
    as_json: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """List the functions and classes that FILE needs beyond torch's default allow-list.

    The command does not run the file's pickle. Exit code: 1 if there are such functions or classes.
    Then torch.load with weights_only=True refuses FILE until you allow them.

    With --json: an object with path and globals. globals is a list of objects with name (the full
    name) and state: "allowed", "not allowed" or "never allowed".
    """
    ordinary = _ordinary_globals(file, storage_options)
    possible: dict[str, Any] = {}
    if ordinary is not None:
        states = dict.fromkeys(sorted(ordinary), _ALLOWED)
    else:
        from ptsave.inspection.pickle_globals import (
            code_to_allow,
            never_allowed,
            required_globals,
            unsafe_globals,
        )

        modules = required_globals(file, storage_options=storage_options)
        unsafe = unsafe_globals(modules)
        possible = {name: modules[name] for name in unsafe if not never_allowed(modules[name])}
        states = dict.fromkeys(sorted(modules.keys() - set(unsafe)), _ALLOWED)
        states |= {name: _NOT if name in possible else _NEVER for name in unsafe}
    code = 0 if {*states.values()} <= {_ALLOWED} else NEGATIVE
    if as_json:
        found = [{"name": name, "state": state} for name, state in states.items()]
        click.echo(json.dumps({"path": file, "globals": found}))
        ctx.exit(code)
    for name, state in states.items():
        if show_all or state != _ALLOWED:
            label = terminal().paint(state.ljust(len(_NEVER)), _COLORS[state])
            click.echo(f"{label}  {printable(name)}")
    if not code:
        click.echo(f"Nothing beyond the allow-list ({count_text(len(states), 'global')}).")
    if possible:
        click.echo(_WARNING)
        for line in code_to_allow(possible).splitlines():
            click.echo(f"    {printable(line)}")
    ctx.exit(code)


def _ordinary_globals(file: str, storage_options: dict[str, Any] | None) -> set[str] | None:
    """Without torch, return a file's globals if all are in `ORDINARY_GLOBALS`; otherwise None."""
    from ptsave.inspection.pickle_globals import ORDINARY_GLOBALS, globals_in_pickle

    found: set[str] = set()
    for source in find_files(file, storage_options).open():
        if source.kind == "safetensors":
            continue
        data = plain_pickle(source)
        if data is None:
            return None
        found |= globals_in_pickle(io.BytesIO(data), source.name).keys()
        source.close()
    return found if found <= ORDINARY_GLOBALS else None
