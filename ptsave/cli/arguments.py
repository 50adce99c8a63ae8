"""Arguments that commands share: files, standard input, names of entries, storage options."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import click
from click.shell_completion import CompletionItem

from ptsave.sources.kinds import is_safetensors

STANDARD_INPUT = "/dev/stdin"  # the system opens descriptor 0
_TAKEN = "ptsave.standard_input"
_COPIED_NBYTES = 4 << 20  # at once
_HEAD_NBYTES = 9  # a safetensors file begins with its header's length (8 bytes) and a brace
_MAX_NAMES = 1000
_EXPECTED = "pass an object such as '{\"anon\": true}'"


class _File(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """The name of a file, directory or URL, unchanged, because a URL is no path."""

    name = "file"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.name)]


class _Source(_File):
    """A file that is read; ``-`` is standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value != "-" or ctx is None or ctx.resilient_parsing:
            return value
        return path_of_standard_input(ctx)


FILE = _File()
SOURCE = _Source()


def path_of_standard_input(ctx: click.Context, *, needs_values: bool = True) -> str:
    """Return a path for a file that holds all of standard input.

    A checkpoint is read at its end first, so a pipe is copied to an unnamed temporary file, which
    replaces descriptor 0.  Without `needs_values` only the header of a safetensors file is copied,
    and a hole stands for the tensors.
    """
    if ctx.meta.get(_TAKEN):
        raise click.UsageError("Standard input can be one argument only.", ctx)
    ctx.meta[_TAKEN] = True
    try:
        status = os.fstat(0)
    except OSError:
        raise click.UsageError("Standard input is closed: pass a path.", ctx) from None
    if os.isatty(0):
        raise click.UsageError("Standard input is a terminal: redirect a file or a pipe.", ctx)
    is_at_begin = stat.S_ISREG(status.st_mode) and os.lseek(0, 0, os.SEEK_CUR) == 0
    if not is_at_begin and not stat.S_ISDIR(status.st_mode):
        import shutil
        import tempfile

        with tempfile.TemporaryFile() as copy:
            if needs_values or not copy_header(sys.stdin.buffer, copy):
                shutil.copyfileobj(sys.stdin.buffer, copy, _COPIED_NBYTES)
            copy.flush()
            os.dup2(copy.fileno(), 0)
    return STANDARD_INPUT


def copy_header(stream: IO[bytes], copy: IO[bytes]) -> bool:
    """Copy a safetensors file's header, extended to the file's size; False if there is none."""
    head = stream.read(_HEAD_NBYTES)
    copy.write(head)
    if not is_safetensors(head, 0):
        return False
    header = stream.read(int.from_bytes(head[:8], "little") - 1)
    copy.write(header)
    try:
        entries = json.loads(b"{" + header)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if end >= 0:
            copy.truncate(copy.tell() + end)
    except Exception:  # the reader will report the damaged header
        return False
    return bool(end >= 0)


def complete_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the entries of the command's file whose names begin with `incomplete`."""
    found: dict[str, None] = {}
    of_modules = ctx.params.get("stats", False) is not False  # only ls has it; None is a default
    try:
        for name in names_in(ctx.params["file"], ctx.params.get("storage_options"), of_modules):
            if name.startswith(incomplete) and name.isprintable():
                found[name] = None
    except Exception:  # the command reports the error when it runs
        return []
    return [CompletionItem(name) for name in list(found)[:_MAX_NAMES]]


def names_in(
    file: str, storage_options: Mapping[str, Any] | None, of_modules: bool
) -> Iterator[str]:
    """Yield the names of a file's entries, or with `of_modules` of a capture's modules."""
    from ptsave.contents.captures import HEADER, is_capture
    from ptsave.contents.directories import find_files
    from ptsave.inspection.reports import list_files

    for listing in list_files(find_files(file, storage_options, distributed=True)):
        if of_modules and is_capture(listing.tree.obj):
            yield from listing.tree.obj[HEADER].get("modules", {})
        else:
            yield from (node.name for node in listing.tree.nodes)


def _json_object(ctx: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Parse an object; errors do not show the text, because it may be a secret."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON ({error}): {_EXPECTED}", ctx, option) from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{_EXPECTED}, not a {type(found).__name__}", ctx, option)
    return found


def with_storage_options(argument: str, prefix: str = "") -> Callable[[Any], Any]:
    """Give a command the option for an argument's file system; `prefix` begins its name."""
    return click.option(
        f"--{prefix}-storage-options" if prefix else "--storage-options",
        callback=_json_object,
        metavar="JSON",
        help=f"If {argument} is a URL: an object of arguments for its file system, for example "
        "'{\"anon\": true}'.",
    )
