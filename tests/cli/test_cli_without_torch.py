"""The command without torch: what it imports, and how it ends when it is interrupted early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from command_line import fail, run

import ptsave
from ptsave.cli.commands import commands
from ptsave.cli.completion import LINE

NAMES = commands.list_commands(click.Context(commands))
# Runs the command, and says at its end which of these modules it has imported.
_RUN = """
import sys
sys.argv[0] = "ptsave"
from ptsave.cli.main import main
try:
    main()
finally:
    found = {"torch", "ptsave._C", "numpy"} & sys.modules.keys()
    print("imported:", *sorted(found), file=sys.stderr)
"""


def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command, under its own name."""
    return subprocess.run(
        [sys.executable, "-c", _RUN, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )


def imported_by(*arguments: str, **variables: str) -> set[str]:
    """Return the heavy modules that a command imports."""
    lines = start(*arguments, **variables).stderr.splitlines()
    (line,) = [line for line in lines if line.startswith("imported:")]
    return set(line.split()[1:])


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["lsx"], *([name, "--help"] for name in NAMES)],
    ids=" ".join,
)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    assert not imported_by(*arguments)


@pytest.mark.parametrize("words", ["ptsave ", "ptsave l", "ptsave diff --", "ptsave ls --so"])
def test_completion_imports_no_torch(words: str) -> None:
    result = start(_PTSAVE_COMPLETE="bash_complete", **{LINE: words})
    assert result.stderr == "imported:\n"
    assert result.stdout


def test_completion_of_what_is_no_text() -> None:
    result = start(_PTSAVE_COMPLETE="bash_complete", **{LINE: "ptsave ls b\udcff"})
    assert (result.stdout, result.stderr) == ("file\tb?\t\n", "imported:\n")


def test_help_says_what_the_commands_say() -> None:
    listed = run("--help").stdout.partition("Commands:\n")[2].splitlines()
    for line, name in zip(listed, NAMES, strict=True):
        command = commands.get_command(click.Context(commands), name)
        assert command is not None
        assert line.split(maxsplit=1) == [name, command.short_help]


@pytest.mark.parametrize(("typed", "meant"), [("lsx", "ls"), ("verfiy", "verify"), ("dif", "diff")])
def test_did_you_mean(typed: str, meant: str) -> None:
    assert f"No such command '{typed}'. Did you mean '{meant}'" in fail(typed)
    assert fail("xyzzy").endswith("No such command 'xyzzy'.\n")


def test_interrupt_at_the_start_is_quiet() -> None:
    """At any moment once Python runs ptsave's code, whatever is being imported."""
    for delay in (0.0, 0.02, 0.05, 0.2, 0.8):
        code = "print('up', flush=True)\nfrom ptsave.cli.main import main\nmain()"
        arguments = [sys.executable, "-c", code, "diff", "/dev/zero", "/dev/zero"]
        with subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay + 0.02)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr
        if process.returncode == 130:  # or it had ended
            assert stderr in ("", "ptsave: interrupted\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As of a program that a shell has put into the background."""
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += "from ptsave.cli.terminal import *\nexit_when_interrupted()\n"
    code += "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"


# ------------------------------------------------------------------------------- the package itself


def test_the_package_imports_nothing() -> None:
    code = "import ptsave, sys; print('torch' in sys.modules, ptsave.__version__)"
    text = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert text.split() == ["False", ptsave.__version__]


# Each in a process of its own, which has not imported torch.
FIRST_USES = [
    "import ptsave; ptsave.load",
    "from ptsave import load",
    "from ptsave import *; load",
    "import ptsave; ptsave.errors.NotCheckpointError",
    "from ptsave import _C; _C.crc32",
    "from ptsave import _core; _core.Archive",
    "import ptsave; assert 'load' in dir(ptsave)",
    "import ptsave; assert not hasattr(ptsave, 'no_such_name')",
    "import ptsave; assert not hasattr(ptsave, '_no_such_name')",
]
_EACH = """
import os, sys
for code in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(code)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def test_first_use() -> None:
    subprocess.run([sys.executable, "-c", _EACH, *FIRST_USES], check=True)


@pytest.mark.parametrize("first", ["import torch; import ptsave", "import ptsave; ptsave.load"])
def test_another_torch_is_refused(tmp_path: Path, first: str) -> None:
    """At once if there is one already, at the first use if not."""
    (tmp_path / "torch.py").write_text("__version__ = '0.4.1'\n")
    home = Path(ptsave.__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", first],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(home)])},
    )
    assert result.returncode == 1
    assert "and torch 0.4.1 is installed" in result.stderr.splitlines()[-1]
