"""Compiles an engine for the installed torch: python -m ptsave.build_engine."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ptsave._built import VERSION
from ptsave.engines import building, choice
from ptsave.engines.choice import FILE_NAME, folder_name

_HELP = """Compile ptsave's engine, its C++ extension, for the installed torch.

A wheel of ptsave has engines for the releases of torch that existed when the wheel was made. For a
newer torch, a nightly build or another build, this command compiles an engine. It needs a C++
compiler, Python's headers, cmake and ninja. It downloads nothing, and does not change torch.
"""


@click.command(help=_HELP)
@click.option("--jobs", type=click.IntRange(min=1), help="Parallel compilers.  [default: cores]")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the engine to this folder, to copy it to another machine.  [default: the folder "
    f"{Path('share', 'ptsave', 'engines', VERSION)} of the environment, where ptsave finds it]",
)
def main(jobs: int | None, folder: Path | None) -> None:
    """Compile an engine and print its path; if this fails, raise SystemExit with the reason."""
    building.check_platform()
    torch_version = building.installed_torch(f"{sys.prefix} has none: install torch first")
    target = _target(folder, torch_version)
    click.echo(f"compiling an engine for torch {torch_version}: a minute or two", err=True)
    with tempfile.TemporaryDirectory(prefix="ptsave-engine-") as build_dir:
        [built] = building.build(Path(build_dir), ["_C"], "PTSAVE_BUILD_PYTHON", VERSION, jobs)
        with _replacement(target) as temporary:
            temporary.write_bytes(built.read_bytes())
    click.echo(target)


def _target(folder: Path | None, torch_version: str) -> Path:
    """Return the file to write, in the first folder that can be made and is writable."""
    candidates = [folder] if folder is not None else choice.own_folders()
    refusals = []
    for candidate in candidates:
        target = candidate / folder_name(torch_version) / FILE_NAME
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refusals.append(str(error))
            continue
        if os.access(target.parent, os.W_OK):
            return target
        refusals.append(f"{target.parent} cannot be written to")
    raise SystemExit(f"ptsave: the engine cannot be written to any folder: {'; '.join(refusals)}")


@contextmanager
def _replacement(target: Path) -> Iterator[Path]:
    """Yield a temporary path; at the end of the block, rename the file at this path to `target`."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m ptsave.build_engine"))
