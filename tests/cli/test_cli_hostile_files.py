"""Files that nobody has meant to be read: what the commands say of them is still true."""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from _corruption import flip
from click.testing import CliRunner
from command_line import fail, run, run_process
from safetensors.torch import save_file
from stock_comparison import saved_bytes, zip_records, zipped

import ptsave
from ptsave.cli.commands import Command
from ptsave.errors import CheckpointWarning
from ptsave.inspection.pickle_globals import required_globals
from ptsave.inspection.verification import verify_file


def archive_of(path: Path, records: dict[str, bytes]) -> Path:
    path.write_bytes(zipped(records))
    return path


NO_CHECKPOINTS = {
    None: "No such file",
    b"": "it is empty",
    b"<!DOCTYPE html><title>404</title>": "an HTML page",
    b"version https://git-lfs.github.com/spec/v1\nsize 5\n": "a git-lfs pointer",
    b"hello": "it is text",
    b"\x1f\x8b123": "gzip",
    b"PK\x03\x04" + bytes(500): "",
}
READERS = [
    *("ls FILE", "show FILE", "extract FILE w -o out.pt", "convert FILE out.safetensors"),
    *("convert FILE out.pt", "compact FILE -o out.pt", "diff FILE whole.pt", "diff whole.pt FILE"),
]


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("line", [*READERS, "globals FILE"])
def test_what_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "whole.pt")
    for content, words in NO_CHECKPOINTS.items():
        if content is not None:
            Path(name).write_bytes(content)
        message = fail(*line.replace("FILE", name).split())
        assert name in message
        assert words in message
        if content is None and line == "ls FILE":
            assert message == f"ptsave: {name}: No such file or directory\n"
        assert {*os.listdir()} <= {name, "whole.pt"}


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("line", READERS)
def test_files_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(20)}, "whole.pt")
    save_file({"w": torch.ones(20)}, "a.safetensors")
    data = Path("whole.pt" if name == "a.pt" else name).read_bytes()
    for nbytes in (*range(0, len(data), 131), len(data) - 1):
        Path(name).write_bytes(data[:nbytes])
        fail(*line.replace("FILE", name).split())
        assert {*os.listdir()} <= {"a.pt", "a.safetensors", "whole.pt"}


def test_format_that_a_safetensors_file_claims(tmp_path: Path) -> None:
    """Files of transformers say that they are for "pt": that does not make them archives."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path, metadata={"format": "pt"})
    assert "a safetensors file has no checksums" in run("verify", path).stderr
    assert '"format": "safetensors"' in run("ls", "--json", path).stdout


@pytest.mark.parametrize("name", ["version", ".data/version", ".storage_alignment", "byteorder"])
def test_nonsense_in_a_small_record(tmp_path: Path, name: str) -> None:
    records = zip_records(saved_bytes(torch.save, {"a": torch.ones(3)}))
    path = archive_of(tmp_path / "a.pt", records | {name: b"\xff\xff\xff\x7f"})
    result = run("verify", path)
    assert result.exit_code in (0, 1), result.stderr
    assert result.exit_code == 0 or "DAMAGED" in result.stdout
    assert (run("ls", path).exit_code == 0) == (result.exit_code == 0)


@pytest.mark.parametrize(
    "data", [b"\x80\x02X\xff\xff\xff\x7fabc.", b"\x80\x02\x8b\xff\xff\xff\x7fa."]
)
def test_pickle_that_ends_too_soon(tmp_path: Path, data: bytes) -> None:
    records = {"data.pkl": data, "version": b"3\n", "byteorder": b"little"}
    result = run("verify", archive_of(tmp_path / "a.pt", records))
    assert result.exit_code == 1
    assert "pickle is damaged" in result.stdout


def sparse() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(2), "coo": torch.eye(4).to_sparse(), "b": torch.ones(3)}


@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:TypedStorage")
def test_tensors_that_need_their_values(tmp_path: Path) -> None:
    path = tmp_path / "sparse.pt"
    torch.save(sparse(), path)
    assert verify_file(path).tensors == list(sparse())
    quantized = torch.ops.aten.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save({"a": torch.ones(2), "q": quantized}, path)
    found = verify_file(path)
    assert found.tensors == ["a", "q"]
    assert not found.remarks


@pytest.mark.parametrize("record", ["data/1", "data/2"])
def test_damage_in_any_part_of_a_sparse_tensor(tmp_path: Path, record: str) -> None:
    path = tmp_path / "sparse.pt"
    torch.save(sparse(), path)
    flip(path, zip_records(path.read_bytes())[record])
    data = path.read_bytes()
    found = verify_file(path)
    assert [problem.entries for problem in found.problems] == [["coo"]]
    assert found.whole == ["a", "b"]
    path.write_bytes(data[: -len(data) // 20])  # without a directory
    assert verify_file(path).whole == ["a", "b"]


def test_pipes_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    os.mkfifo(path)
    commands_on_it = [[name, path] for name in ("ls", "show", "verify", "globals")]
    commands_on_it += [["extract", path, "a"], ["diff", path, path], ["ls", tmp_path]]
    for arguments in commands_on_it:
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "this is a pipe, which does not support seeking" in result.stderr
    with pytest.raises(OSError, match="this is a pipe"):
        ptsave.load_model(torch.nn.Linear(1, 1), tmp_path)


def test_archive_cut_in_its_first_name(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save([torch.ones(3)], path)
    data = path.read_bytes()
    for nbytes in range(4, 40, 3):
        path.write_bytes(data[:nbytes])
        assert "failed reading zip archive" in run("ls", path).stderr


def test_advice_on_numpy_is_enough(tmp_path: Path) -> None:
    """torch wants the classes of dtypes to be allowed, too, which no pickle names."""
    path = tmp_path / "a.pt"
    arrays: list[Any] = [np.arange(3.0), np.zeros(2, dtype=">u2"), np.array(["x"]), np.float16(1.5)]
    torch.save({"rng": np.random.get_state(), "arrays": arrays}, path, pickle_protocol=4)
    named = required_globals(path)
    torch.save({"rng": np.random.get_state(), "arrays": arrays}, path)
    assert required_globals(path).keys() - named.keys() == {"_codecs.encode"}
    result = run("globals", path)
    code = "\n".join(line.strip() for line in result.stdout.splitlines() if line.startswith("    "))
    assert result.exit_code == 1
    with torch.serialization.safe_globals([]):  # which forgets them afterwards
        exec(code, {})
        loaded = torch.load(path)
    assert all(np.array_equal(*pair) for pair in zip(loaded["arrays"], arrays, strict=True))


def test_what_is_refused_in_which_file(tmp_path: Path) -> None:
    plain, other, odd = (tmp_path / name for name in ("plain.pt", "other one.pt", "odd.pt"))
    torch.save([1], plain)
    torch.save([np.float64(1)], other, _use_new_zipfile_serialization=False)
    message = run("diff", plain, other).stderr
    assert message.startswith(f"ptsave: {other} needs more than")
    assert "`ptsave globals FILE`" in message
    archive_of(odd, {"data.pkl": b"\x80\x02K\x01K\x01b.", "version": b"3\n"})
    message = run("ls", odd).stderr
    assert "Can only build Tensor" in message
    assert "ptsave globals" not in message  # which would say that there is nothing


@pytest.mark.filterwarnings("default")
def test_warnings_that_are_not_about_the_file() -> None:
    @click.command("warn", cls=Command)
    def command() -> None:
        warnings.warn("a remark for programmers", UserWarning, stacklevel=1)
        warnings.warn("a remark on the file", CheckpointWarning, stacklevel=1)

    assert CliRunner().invoke(command, []).stderr == "ptsave: a remark on the file\n"
    assert "programmers" in CliRunner().invoke(command, ["--debug"]).stderr


def odd_names() -> dict[object, object]:
    return {
        "a": {"b": torch.ones(1)},
        "a.b": torch.ones(2),
        0: torch.ones(3),
        "0": torch.ones(4),
        "(1, 2)": torch.ones(5),
        "": torch.ones(6),
        " ": torch.ones(7),
        "\u65e5\u672c": torch.ones(8),
    }


@pytest.mark.parametrize(
    ("name", "n"),
    [("('a.b',)", 2), ("('a', 'b')", 1), ("(0,)", 3), ("('0',)", 4), ("(1, 2)", 5), ("('',)", 6)],
)
def test_names_that_are_tuples_or_look_so(tmp_path: Path, name: str, n: int) -> None:
    """ls, and what extract says of ambiguous names, show what both commands take."""
    path, output = tmp_path / "odd.pt", tmp_path / "o.pt"
    torch.save(odd_names(), path)
    assert f"float32 [{n}] " in " ".join(run("ls", path, name).stdout.split())
    assert run("extract", path, name, "-o", output).exit_code == 0
    assert torch.load(output).shape == (n,)


def test_names_are_seen_and_aligned(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    torch.save(odd_names(), path)
    lines = [line for line in run("ls", path).stdout.splitlines() if " [" in line]
    columns = {line.index("float32") + sum(c >= "\u2e80" for c in line) for line in lines}
    assert len(columns) == 1
    assert [line.split("  ")[0] for line in lines if line.startswith("'")] == ["''", "' '"]


@pytest.mark.parametrize("index", [b"\xff garbage", b"[1]", b'{"weight_map": {"a": "../b"}}'])
def test_damaged_index(tmp_path: Path, index: bytes) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert "model.safetensors.index.json: " in result.stdout
    assert "ptsave verify" not in result.stdout + result.stderr


def test_pipe_that_nobody_reads(tmp_path: Path) -> None:
    """1 would be an answer: of verify, that the file is damaged."""
    torch.save([torch.ones(3)], tmp_path / "a.pt")
    reader, writer = os.pipe()
    os.close(reader)
    pipes = {"capture_output": False, "stdout": writer, "stderr": subprocess.PIPE}
    ended = run_process("verify", tmp_path / "a.pt", check=False, **pipes)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(
    ("line", "unbuffered"),
    [
        *(("verify a.pt", ""), ("verify a.pt", "1"), ("ls a.pt", "")),
        *(("ls --help", ""), ("--version", "1"), ("completion bash", "")),
    ],
)
def test_output_that_cannot_be_written(tmp_path: Path, line: str, unbuffered: str) -> None:
    """Python 3.13 and later flush once more at exit, and would exit with 120."""
    torch.save([torch.ones(3)], tmp_path / "a.pt")
    with open("/dev/full", "w") as full:
        ended = run_process(
            *line.split(),
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            capture_output=False,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert (ended.returncode, ended.stderr) == (2, "ptsave: No space left on device\n")


def test_extract_to_a_directory(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    for force in ([], ["--force"]):
        assert "is a directory: name a file in it" in fail(
            "extract", tmp_path / "a.pt", "a", "-o", tmp_path, *force
        )
