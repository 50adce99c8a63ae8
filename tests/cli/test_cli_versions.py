"""`delta`, `apply`, `ls`, `verify` and `compact` of directories of versions of weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import delta_reference as reference
import pytest
import torch
from command_line import json_of, run, succeed
from delta_reference import assert_same_bits, changed
from safetensors.torch import load_file, save_file
from torch import Tensor

import ptsave
from ptsave.deltas import Publisher


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Four states, whose files are 0.safetensors, ... here."""
    monkeypatch.chdir(tmp_path)
    found = [{"a": torch.randn(50, 40), "b": torch.randn(20)}]
    for _ in range(3):
        found.append({name: changed(tensor, 0.02) for name, tensor in found[-1].items()})
    for number, each in enumerate(found):
        save_file(each, f"{number}.safetensors")
    return found


def write_all(*options: str) -> None:
    for number in range(3):
        succeed("delta", f"{number}.safetensors", f"{number + 1}.safetensors", "-o", "v", *options)


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_delta_and_apply(encoding: str, weights: list[dict[str, Tensor]]) -> None:
    write_all("--encoding", encoding, "--checksum", "adler32", "--fsync")
    index = json.loads(Path("v/weight_v000003", reference.INDEX).read_text())
    assert index["metadata"]["delta_encoding"] == encoding
    assert index["metadata"]["checksum_format"] == "adler32"
    shutil.copy("0.safetensors", "served.safetensors")
    assert json_of("apply", "v", "served.safetensors", "--version", 2) == {
        "path": "served.safetensors", "version": 2
    }  # fmt: skip
    assert_same_bits(load_file("served.safetensors"), weights[2])
    assert (
        succeed("apply", "v", "served.safetensors").stdout == "served.safetensors has version 3\n"
    )
    assert_same_bits(load_file("served.safetensors"), weights[3])
    refused = run("delta", "0.safetensors", "1.safetensors", "-o", "v")
    assert refused.exit_code == 2
    assert "the base is not version 3 of" in refused.stderr
    assert run("apply", "v", "0.safetensors", "--version", 9).exit_code == 2
    assert run("apply", "v", "missing").exit_code == 2
    save_file({"a": torch.zeros(3)}, "other.safetensors")
    for new in ("missing", "other.safetensors"):
        assert run("delta", "0.safetensors", new, "-o", "none").exit_code == 2
    assert not Path("none").exists()


def test_delta_says_what_it_wrote(weights: list[dict[str, Tensor]]) -> None:
    found = json_of("delta", "0.safetensors", "1.safetensors", "-o", "v", "--max-depth", 1)
    assert (found["number"], found["encoding"], found["tensors"]) == (1, "overwrite", 2)
    text = succeed("delta", "1.safetensors", "2.safetensors", "-o", "v", "--max-depth", 1).stdout
    assert "weight_v000002: whole, 2 tensors, 7.89 KiB" in text
    assert_same_bits(ptsave.load("v/weight_v000002"), weights[2])


def test_ls(weights: list[dict[str, Tensor]]) -> None:
    write_all("--max-depth", "1")
    rows = [line.split() for line in succeed("ls", "v").stdout.splitlines()]
    assert [row[:2] for row in rows] == [["1", "overwrite"], ["2", "whole"], ["3", "overwrite"]]
    found = json_of("ls", "v")["versions"]
    assert [(each["base"], each["encoding"]) for each in found] == [
        (0, "overwrite"), (2, "whole"), (2, "overwrite")
    ]  # fmt: skip
    assert found[1]["nbytes"] == sum(each.nbytes for each in weights[0].values())
    assert found[1]["ratio"] == 1
    assert 0 < found[0]["ratio"] < 0.5
    assert found[0]["modified"] == pytest.approx(Path("v/weight_v000001").stat().st_mtime, abs=60)
    assert "pass the path of one version (weight_v000001, " in run("ls", "v", "a").stderr
    Path("v/weight_v000001", reference.INDEX).write_text("{")
    broken = run("ls", "v")
    assert broken.exit_code == 2
    assert "not JSON" in broken.stderr
    assert len(broken.stdout.splitlines()) == 2


def states_of(*arguments: str) -> list[str]:
    found = run("verify", "v", "--json", *arguments)
    assert found.exit_code in (0, 1), found.stderr
    return [each["state"] for each in json.loads(found.stdout)["arguments"][0]["files"]]


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_verify(encoding: str, weights: list[dict[str, Tensor]]) -> None:
    write_all("--encoding", encoding)
    save_file({"a": torch.randn(50, 40), "b": weights[0]["b"]}, "other.safetensors")
    text = succeed("verify", "v")
    assert "weight_v000001: no checksums (2 tensors" in text.stdout
    assert "see --base" in text.stderr
    assert states_of() == ["no checksums"] * 3
    assert states_of("--base", "0.safetensors") == ["whole"] * 3
    for name in ("3", "other"):  # a later version, and none of the versions
        refused = run("verify", "v", "--base", f"{name}.safetensors")
        assert refused.exit_code == 2
        assert "--base is not version 0: " in refused.stderr
        assert "DAMAGED" not in refused.stdout
    shutil.rmtree("v/weight_v000002")
    ptsave.save_model(weights[2], "v/weight_v000002")
    assert states_of() == ["no checksums", "whole", "whole"]
    shutil.rmtree("v/weight_v000002")
    found = run("verify", "v", "--base", "0.safetensors")
    assert found.exit_code == 1
    assert "based on version 2, which is missing" in found.stdout


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_verify_finds_damage(encoding: str, weights: list[dict[str, Tensor]]) -> None:
    write_all("--encoding", encoding)
    shard = Path("v/weight_v000002", reference.SHARD)
    data = shard.read_bytes()
    for n_flips, (damaged, base) in enumerate(
        [(data[:-1], []), (data[:-1], ["--base", "0.safetensors"]), (b"", [])]
    ):
        shard.write_bytes(damaged)
        assert states_of(*base)[1] == "damaged", n_flips
    shutil.copy("v/weight_v000003/" + reference.SHARD, shard)  # of another version
    assert states_of("--base", "0.safetensors")[1] == "damaged"
    Path("v/weight_v000002", reference.INDEX).unlink()
    assert states_of()[1] == "damaged"


def test_compact(weights: list[dict[str, Tensor]]) -> None:
    write_all()
    for options in ([], ["-o", "out"], ["--in-place", "--dry-run"], ["--in-place", "-o", "out"]):
        assert run("compact", "v", *options).exit_code == 2
    assert len([*Path("v").iterdir()]) == 3
    assert "2 other versions could become part of it" in succeed("compact", "v", "--dry-run").stdout
    found = json_of("compact", "v", "--in-place")
    assert (found["base"], found["removed"], found["written"]) == (0, [1, 2], True)
    assert "nothing to gain" in succeed("compact", "v", "--in-place").stdout
    assert states_of("--base", "0.safetensors") == ["whole"]
    succeed("apply", "v", "0.safetensors")
    assert_same_bits(load_file("0.safetensors"), weights[3])


@pytest.mark.usefixtures("_clean_file_systems")
def test_urls(weights: list[dict[str, Tensor]]) -> None:
    Publisher("memory://v", weights[0]).publish(weights[1])
    succeed("delta", "1.safetensors", "2.safetensors", "-o", "memory://v", "--max-depth", 1)
    assert [each["encoding"] for each in json_of("ls", "memory://v")["versions"]] == [
        "overwrite",
        "whole",
    ]
    assert "whole" in succeed("verify", "memory://v", "--base", "0.safetensors").stdout
    assert "nothing to gain" in succeed("compact", "memory://v", "--in-place").stdout
    succeed("apply", "memory://v", "0.safetensors")
    assert_same_bits(load_file("0.safetensors"), weights[2])
