"""ptsave run: a program, and every Python that it starts, with ptsave installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import fail, run, run_process

_PROGRAM = """
import multiprocessing, sys
from torch import save  # bound before anybody could call install()

def where(_=0):
    import torch
    return torch.save.__module__

if __name__ == "__main__":
    print(save.__module__, *sys.argv[1:])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(where, [0])[0])
"""


def run_program(*arguments: str | os.PathLike[str], **variables: str) -> str:
    root = str(Path(__file__).parent.parent.parent)
    path = f"{variables.pop('PYTHONPATH', '')}{os.pathsep}{root}".strip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = run_process("run", *arguments, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reaches_spawned_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    assert run_program(program, "--flag", "-m", "x").splitlines() == [
        "ptsave.serialization --flag -m x",
        "ptsave.serialization",
    ]


def test_modules_options_and_another_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.was_here = True\n")
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "assert 'torch' not in sys.modules\n"
        "import torch, safetensors.torch, ptsave\n"
        "from ptsave import installation\n"
        "print(was_here, sys.argv[1:], safetensors.torch.save_file.__module__)\n"
        "print(os.environ['PTSAVE_INSTALL'], torch.save is ptsave.save)\n"
        "options = vars(installation._calls[-1]).items()\n"
        "print(*(f'{name}={value}' for name, value in options if value is not None))\n"
    )
    options = ("--safetensors", "--fsync", "--no-verify", "--distributed", "--weights-only-check")
    assert run_program(*options, "-m", "program", "3", PYTHONPATH=str(tmp_path)).splitlines() == [
        "True ['3'] ptsave.streaming.safetensors_functions",
        "safetensors,fsync,no-verify,distributed,weights-only-check False",
        "safetensors=True fsync=True verify=False distributed=True weights_only_check=True",
    ]


@pytest.mark.parametrize(
    "first",
    ["import ptsave", "from ptsave.errors import SaveError", "importlib.util.find_spec('torch')"],
)
def test_before_torch(first: str, tmp_path: Path) -> None:
    """Also if something else than torch is imported, or if torch is only looked for."""
    (tmp_path / "program.py").write_text(
        f"import importlib.util\n{first}\nimport torch, ptsave\nprint(torch.save is ptsave.save)\n"
    )
    assert run_program(tmp_path / "program.py") == "True\n"


def test_nothing_to_run() -> None:
    result = run("run")
    assert result.exit_code == 2
    assert "Name a script" in result.output


def test_options_of_the_program_go_behind_it() -> None:
    assert "--epochs. Options of the program go behind its name" in fail(
        "run", "--epochs", "3", "train.py"
    )


def test_variable_that_is_off(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, subprocess, sys\n"
        "for os.environ['PTSAVE_INSTALL'] in ('', '0'):\n"
        "    program = 'import torch; print(torch.save.__module__)'\n"
        "    subprocess.check_call([sys.executable, '-c', program])\n"
    )
    assert run_program(tmp_path / "program.py") == "torch.serialization\n" * 2


def test_variable_with_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    from ptsave.support import config

    monkeypatch.setenv("PTSAVE_INSTALL", " fsync, no-verify ,weights-only-check")
    options = {"fsync": True, "verify": False, "weights_only_check": True}
    assert config.install_options() == options


@pytest.mark.parametrize("text", ["2", "fsync,", "no-", "true"])
def test_bad_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptsave.support import config

    monkeypatch.setenv("PTSAVE_INSTALL", text)
    with pytest.raises(ValueError, match="PTSAVE_INSTALL must be 1, or some of safetensors"):
        config.install_options()
