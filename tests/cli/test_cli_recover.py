"""`--recover`: what a killed process has left is listed, extracted and converted."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from _system import Child
from command_line import fail, json_of, run, succeed
from stock_comparison import assert_same_object
from torch import nn

import ptsave

ENTRIES = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int8)}


def leftover_of(path: Path) -> str:
    (leftover,) = path.parent.glob(f".{path.name}.*.ptsave")
    return str(leftover)


@pytest.fixture
def leftover(tmp_path: Path) -> str:
    path = tmp_path / "run.pt"

    def write() -> None:
        writer = ptsave.ArchiveWriter(path)
        writer.add_group(ENTRIES)
        writer.flush()
        writer.add("late", torch.ones(3))
        os.kill(os.getpid(), signal.SIGKILL)

    Child(write).wait()
    return leftover_of(path)


@pytest.mark.parametrize("command", ["ls", "verify", "extract", "convert"])
def test_without_it_the_file_is_damaged(leftover: str, tmp_path: Path, command: str) -> None:
    rest = {"extract": ["a"], "convert": [str(tmp_path / "new.pt")]}.get(command, [])
    result = run(command, leftover, *rest)
    assert result.exit_code == (1 if command == "verify" else 2)
    assert "--recover" in result.output
    assert os.listdir(tmp_path) == [os.path.basename(leftover)]
    for read in (ptsave.open, ptsave.load):
        with pytest.raises(ptsave.CorruptCheckpointError, match="recover=True"):
            read(leftover)


def test_ls(leftover: str) -> None:
    listed = json_of("ls", leftover, "--recover")
    assert [tensor["name"] for tensor in listed["tensors"]] == ["a", "b"]
    assert "a  float32  [2, 3]  24 B" in succeed("ls", leftover, "--recover").output
    assert "2.5" in succeed("ls", leftover, "--recover", "--stats").output


def test_extract(leftover: str, tmp_path: Path) -> None:
    target = tmp_path / "a.pt"
    succeed("extract", leftover, "a", "--recover", "-o", target)
    assert_same_object(torch.load(target), ENTRIES["a"])


def test_convert(leftover: str, tmp_path: Path) -> None:
    """It becomes a file that torch reads."""
    target = tmp_path / "new.pt"
    succeed("convert", leftover, target, "--recover")
    assert_same_object(torch.load(target), ENTRIES)
    ptsave.convert(leftover, tmp_path / "new.safetensors", recover=True)
    with ptsave.open(tmp_path / "new.safetensors") as archive:
        assert_same_object(archive.get_tensor("b"), ENTRIES["b"])


def test_a_whole_file_is_as_without(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    torch.save(ENTRIES, path)
    assert succeed("ls", path, "--recover").output == succeed("ls", path).output


def test_a_capture(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"

    def train() -> None:
        model = nn.Linear(2, 2)
        capture = ptsave.capture(model, path).start()
        model(torch.ones(1, 2))
        capture.step()
        capture._writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    Child(train).wait()
    shown = succeed("ls", leftover_of(path), "--recover", "--stats").output
    assert "unfinished: the process was killed" in shown
    assert "1 step, 1 call" in shown


def test_verify(leftover: str) -> None:
    result = run("verify", leftover, "--recover")
    assert (result.exit_code, result.stderr) == (0, f"ptsave: {leftover}: {NO_END}\n")
    assert f"{leftover}: unfinished, but whole (" in result.stdout
    (facts,) = re.findall(r"\(.*\)", result.stdout)
    result = run("verify", leftover)
    assert result.exit_code == 1  # it is no checkpoint that torch.load opens
    assert f"{leftover}: DAMAGED {facts}" in result.stdout
    assert "the finished part is undamaged (--recover reads it)" in result.stdout
    assert "2 of 2 tensors can be read" in result.stdout
    content = bytearray(Path(leftover).read_bytes())
    content[content.index(ENTRIES["b"].numpy().tobytes())] ^= 1
    Path(leftover).write_bytes(content)
    result = run("verify", leftover)
    assert result.exit_code == 1
    assert "not all of the finished part is undamaged (--recover reads it)" in result.stdout
    assert "1 of 2 tensors can be read" in result.stdout
    result = run("verify", leftover, "--recover")
    assert result.exit_code == 1
    assert "record data/1: damaged or missing: data/1; without the entries b" in result.stdout
    assert "1 of 2 tensors can be read" in result.stdout
    assert f"ptsave extract {leftover} --whole" in result.stdout
    listed = run("ls", leftover, "--recover")
    assert "damaged or missing: data/1; without the entries b" in listed.stderr
    Path(leftover).write_bytes(content[:100])
    assert "nothing can be recovered" in fail("ls", leftover, "--recover")
    result = run("verify", leftover)
    assert result.exit_code == 1
    assert "0 records are undamaged" in result.stdout


NO_END = "the file has no end: only its finished part was checked"
