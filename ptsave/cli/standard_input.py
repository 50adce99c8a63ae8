"""The argument ``-`` of commands: a checkpoint on standard input, from a file or a pipe."""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import IO

import click

from ptsave.sources.kinds import is_safetensors

__all__ = ["STANDARD_INPUT", "copy_header", "path_of_standard_input"]

STANDARD_INPUT = "/dev/stdin"  # which the system opens as whatever descriptor 0 is
_TAKEN = "ptsave.standard_input"
_COPIED_NBYTES = 4 << 20  # at once
_HEAD_NBYTES = 9  # of a safetensors file: the length of its header, and a brace


def path_of_standard_input(ctx: click.Context, *, needs_values: bool = True) -> str:
    """Return a path for a file that holds all of standard input.

    A checkpoint is read at its end first, so a pipe is copied to a temporary file without a name,
    which takes the place of standard input.

    Parameters
    ----------
    ctx : click.Context
        That of the command.
    needs_values : bool, default True
        Whether tensors are read.  If not, only the header of a safetensors file is read from a
        pipe, and a hole stands for the rest.

    Raises
    ------
    click.UsageError
        If it is a terminal, closed, or taken by another argument.
    OSError
        If it cannot be read, or the disk has no room for it.
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
    """Copy the beginning of a stream: all that there is to know about a sound safetensors file.

    Returns
    -------
    bool
        Whether it is one, whose size the copy has; if not, the rest is to be copied, too.
    """
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
    except Exception:  # a damaged header, which its reader reports
        return False
    return bool(end >= 0)
