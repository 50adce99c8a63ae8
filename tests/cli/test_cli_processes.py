"""The command in processes: what it imports, early interrupts, ``run``, completion in shells."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import torch
from command_line import fail, run, run_process

import ptsave
from ptsave.cli.commands import commands
from ptsave.cli.completion import LINE
from ptsave.support import config

NAMES = commands.list_commands(click.Context(commands))
# Runs the command, and says at its end which of these modules it has imported.
_RUN = """
import sys
sys.argv[0] = "ptsave"
from ptsave.__main__ import main
try:
    main()
finally:
    found = {"torch", "ptsave._C", "numpy"} & sys.modules.keys()
    print("imported:", *sorted(found), file=sys.stderr)
"""


def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command, under its own name."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", _RUN, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


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
        code = "print('up', flush=True)\nfrom ptsave.__main__ import main\nmain()"
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
    assert "but torch 0.4.1 is installed" in result.stderr.splitlines()[-1]


# ---------------------------------------------------------------------------------------------- run


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
    assert "--epochs. Options of the program go after its name" in fail(
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
    monkeypatch.setenv("PTSAVE_INSTALL", " fsync, no-verify ,weights-only-check")
    options = {"fsync": True, "verify": False, "weights_only_check": True}
    assert config.install_options() == options


@pytest.mark.parametrize("text", ["2", "fsync,", "no-", "true"])
def test_bad_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTSAVE_INSTALL", text)
    with pytest.raises(ValueError, match="PTSAVE_INSTALL must be 1, or some of safetensors"):
        config.install_options()


# ------------------------------------------------------------------------------------------- shells


START = {"bash": ["bash", "-i"], "zsh": ["zsh", "-i"], "fish": ["fish", "-i"]}
SECONDS = 20
COMPLETIONS = {
    "ptsave verif": "verify ",
    "ptsave ls --dep": "--depth ",
    "ptsave ls mod": "model.pt ",
    "ptsave ls model.pt layers.s": "layers.second ",
    "ptsave ls a\\ mod": "a\\ model.pt ",
    "ptsave ls a\\ model.pt layers.i": "it\\ is ",
    "ptsave ls 'a model.pt' 'layers.i": "it is' ",
}


@pytest.fixture(scope="module", params=START)
def account(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home of somebody who has run the examples, named after the shell."""
    shell = str(request.param)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    home: Path = tmp_path_factory.mktemp("home") / shell
    home.mkdir()
    program = home / "bin" / "ptsave"
    program.parent.mkdir()
    code = "from ptsave.__main__ import main; main()"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    program.chmod(0o755)
    torch.save({"layers": {"first": torch.ones(2), "it is": torch.ones(1)}}, home / "a model.pt")
    torch.save({"layers": {"first": torch.ones(2), "second": torch.ones(1)}}, home / "model.pt")
    examples = run("completion", "--help").stdout.partition("Examples:")[2].splitlines()
    (line,) = [line.strip() for line in examples if f" {shell} " in line]
    subprocess.run(["sh", "-c", line], check=True, env=environment(home), cwd=home)
    return home


def environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    root = str(Path(ptsave.__file__).parent.parent)
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {"HOME": str(home), "PATH": path, "TERM": "xterm", "PYTHONPATH": python_path}


class Shell:
    """A shell on a terminal of its own."""

    def __init__(self, home: Path) -> None:
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(home)
            command = START[home.name]
            os.execvpe(command[0], command, environment(home))
        self._shown = ""
        self.type("echo rea''dy\n")
        self.wait_for("ready")

    def type(self, text: str) -> None:
        self._shown = ""
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str) -> None:
        """Fail if the terminal does not show some text in time."""
        end = time.monotonic() + SECONDS
        while text not in self.shown():
            ready, _, _ = select.select([self._terminal], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.shown()!r}"
            self._shown += os.read(self._terminal, 1 << 16).decode(errors="replace")

    def shown(self) -> str:
        """Return what is shown, without what moves the cursor and colours text."""
        return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>]|\][^\a]*\a|\(B)", "", self._shown)

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._pid, 0)


def test_completion(account: Path) -> None:
    shell = Shell(account)
    try:
        for typed, completed in COMPLETIONS.items():
            shell.type(f"{typed}\t\x0c")  # Ctrl-L shows all of the line again
            shell.wait_for(completed)
            shell.type("\x15")  # Ctrl-U empties it
    finally:
        shell.close()
