"""Starts the command line, for ``ptsave`` and for ``python -m ptsave``."""

from __future__ import annotations

import sys

from ptsave.cli.terminal import exit_when_interrupted


def main() -> None:
    """Run the command line."""
    exit_when_interrupted()
    import io
    import os

    from ptsave.cli.commands import commands, exits_if_unwritable

    if "_PTSAVE_COMPLETE" in os.environ:  # a shell asks for completions
        import ptsave.cli.completion  # noqa: F401 - tells click about the shells

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may have any character
    with exits_if_unwritable():
        commands(prog_name="ptsave")


if __name__ == "__main__":
    main()
