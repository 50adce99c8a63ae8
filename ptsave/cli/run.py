"""``ptsave run``: runs a program whose torch.save and torch.load are ptsave's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

import ptsave.startup
from ptsave.cli.commands import Command

_EXAMPLES = """
ptsave run train.py --epochs 3
ptsave run --fsync --safetensors train.py
ptsave run -m torch.distributed.run --nproc-per-node 2 train.py
"""
_TO_THE_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("run", cls=Command, examples=_EXAMPLES, context_settings=_TO_THE_PROGRAM)
@click.option("--safetensors", is_flag=True, help="Replace safetensors.torch's functions, too.")
@click.option("--fsync", is_flag=True, help="Files survive power loss once they are saved.")
@click.option("--no-atomic", is_flag=True, help="Overwrite files in place.")
@click.option("--no-verify", is_flag=True, help="Do not compare checksums.")
@click.option("--distributed", is_flag=True, help="Replace torch.distributed.checkpoint's storage.")
@click.option("--weights-only-check", is_flag=True, help="Warn of objects that need code to load.")
@click.option("--checksums", is_flag=True, help="Add checksums to safetensors files.")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT] [ARGUMENTS]...")
def run_command(*, module: str | None, arguments: tuple[str, ...], **switches: bool) -> None:
    """Run SCRIPT with ptsave.install(), also in every Python process that it starts.

    So the workers of launchers, multiprocessing and data loaders use ptsave, too. The installation
    happens when torch is imported, before any module can bind torch's functions to its own names.
    Child processes read the variable PTSAVE_INSTALL, and find ptsave's start-up code through
    PYTHONPATH. Programs that clear these variables, and python -E, -I or -S, do not use ptsave.
    """
    if module is None and not arguments:
        raise click.UsageError("Name a script, or -m MODULE.")
    if module is None and arguments[0].startswith("-") and arguments[0] != "-":
        raise click.UsageError(
            f"No such option: {arguments[0]}. Options of the program go after its name: "
            "ptsave run SCRIPT --epochs 3"
        )
    asked = [word.replace("_", "-") for word, is_asked in switches.items() if is_asked]
    if switches["safetensors"]:
        from ptsave.streaming.safetensors_functions import require_library

        require_library()
    environment = dict(os.environ)
    environment["PTSAVE_INSTALL"] = ",".join(asked) or "1"
    folder = str(Path(ptsave.startup.__file__).parent)
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else folder
    program = ["-m", module, *arguments] if module else [*arguments]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *flags, *program], environment)
