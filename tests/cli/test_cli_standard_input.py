"""`-` is standard input: a file, from its beginning, or a pipe."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import run
from safetensors.torch import save_file

from ptsave.cli.commands import copy_header

START = f"{sys.executable} -c 'from ptsave.__main__ import main; main()'"


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"a": torch.ones(3)}, "epoch": 3}, "a.pt")
    return tmp_path / "a.pt"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell, in which ``ptsave`` is the command."""
    return subprocess.run(
        ["sh", "-c", f'ptsave() {{ {START} "$@"; }}\n{line}'],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    "line",
    [
        "ptsave {} - < a.pt",
        "cat a.pt | ptsave {} -",
        "(echo x; cat a.pt) | (read x; ptsave {} -)",
        "(echo x; cat a.pt) > more; (read x; ptsave {} -) < more",
    ],
)
def test_files_and_pipes(line: str) -> None:
    assert "\n  a    float32    [3]  12 B\n" in shell(line.format("ls")).stdout
    assert shell(line.format("verify")).stdout.startswith("/dev/stdin: whole (")


def test_the_header_of_a_safetensors_file_is_enough(path: Path) -> None:
    """Nothing behind it is read, of which there may be much."""
    tensors = {"a": torch.ones(3), "b": torch.zeros(1000, 1000)}
    save_file(tensors, "a.safetensors", metadata={"by": "us"})
    for options in ("", "--json"):
        listed = shell(f"ptsave ls a.safetensors {options}").stdout
        assert "3.81 MiB" in listed or '"nbytes": 4000000' in listed
        piped = shell(f"head -c 500 a.safetensors | ptsave ls - {options}")
        assert (piped.returncode, piped.stderr) == (0, "")
        assert piped.stdout.replace("/dev/stdin", "a.safetensors") == listed
    assert "mean" in shell("cat a.safetensors | ptsave ls - --stats").stdout
    assert shell("head -c 500 a.safetensors | ptsave ls - --stats").returncode == 2
    # Two files, of which one is piped.
    both = shell("cat a.safetensors | ptsave ls a.pt -").stdout
    assert both.count("==>") == 2
    assert "==> /dev/stdin <==" in both


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,-4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,9223372036854775808]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,"4"]}}',
        '{"a":3}',
        '{"a":',
    ],
)
def test_headers_that_are_damaged(path: Path, header: str) -> None:
    """All of such a file is copied, so that the error is the same as for the file itself."""
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(4)
    with io.BytesIO(data) as stream, path.open("w+b") as copy:
        assert not copy_header(stream, copy)
        copy.write(stream.read())
    assert path.read_bytes() == data


def test_other_commands() -> None:
    done = shell("ptsave extract a.pt model -o - | ptsave extract - a -o b.npy")
    assert (done.returncode, done.stdout) == (0, "wrote b.npy: 1 tensor, 12 B\n")
    done = shell("ptsave diff - a.pt < a.pt")
    assert (done.returncode, done.stdout[:6]) == (0, "equal:")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ptsave ls - <&-", "Standard input is closed"),
        ("ptsave ls - < /dev/null", "it is empty"),
        ("ptsave diff - - < a.pt", "Only one argument"),
        ("ptsave compact --in-place - < a.pt", "cannot be replaced"),
        ("ptsave convert a.pt -", "for a file called -, pass ./-"),
        ("ptsave compact a.pt -o -", "for a file called -, pass ./-"),
    ],
)
def test_refusals(line: str, message: str) -> None:
    done = shell(line)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir() == ["a.pt"]


@pytest.mark.parametrize("command", ["ls", "ls --stats", "verify", "globals"])
def test_standard_output_that_is_closed(command: str) -> None:
    """Whoever closes it wants to know the exit code only."""
    done = shell(f"ptsave {command} a.pt >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_of_that_name(path: Path) -> None:
    path.rename("-")
    result = run("verify", "./-")
    assert result.stdout.startswith("./-: whole")
