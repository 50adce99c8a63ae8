"""The argument ``-`` of commands: a checkpoint on standard input, from a file or a pipe."""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import IO

import click

from ptsave.sources.kinds import is_safetensors

STANDARD_INPUT = "/dev/stdin"  # the system opens descriptor 0
_TAKEN = "ptsave.standard_input"
_COPIED_NBYTES = 4 << 20  # at once
_HEAD_NBYTES = 9  # a safetensors file begins with its header's length (8 bytes) and a brace


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
    """Copy the header of a safetensors file, and extend the copy to the file's size.

    Return False if it is no such file, or damaged: then the caller copies the rest.
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
    except Exception:  # the reader will report the damaged header
        return False
    return bool(end >= 0)
