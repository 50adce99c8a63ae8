"""`ptsave extract`: what is in the new file is what torch loads from the old one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _corruption import flip, offset_of
from click.shell_completion import ShellComplete
from command_line import fail, json_of, run
from safetensors.torch import load_file, save_file
from stock_comparison import assert_same_object, stock_load
from torch import Tensor
from warm_python import WarmProcess, run_warm

import ptsave
from ptsave.cli.commands import commands
from ptsave.inspection.extraction import read_whole, write_entries

BIG = torch.arange(10_000.0).view(100, 100)


def checkpoint() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    return {
        "model": {"a.weight": weight, "a.bias": torch.zeros(3), "tied": weight},
        "a": {"b": torch.ones(1)},
        "a.b": torch.zeros(1),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "view": BIG[:2, :5],
        "epoch": 3,
    }


extract = partial(run, "extract")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save(checkpoint(), tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def test_container_and_value(path: Path) -> None:
    expected = stock_load(path)
    result = extract(path, "model")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "wrote model.pt: 3 tensors, 108 B\n"
    assert_same_object(stock_load("model.pt"), expected["model"])
    assert extract(path, "epoch", "-o", "epoch.pt").exit_code == 0
    assert stock_load("epoch.pt") == 3


def test_several(path: Path) -> None:
    assert extract(path, "epoch", "model.a.bias").exit_code == 2
    assert extract(path, "epoch", "model.a.bias", "-o", "some.pt").exit_code == 0
    assert_same_object(stock_load("some.pt"), {"epoch": 3, "model.a.bias": torch.zeros(3)})


def test_view_does_not_bring_its_storage(path: Path) -> None:
    assert extract(path, "view").exit_code == 0
    assert torch.equal(stock_load("view.pt"), BIG[:2, :5])
    assert os.stat("view.pt").st_size < BIG.nbytes / 2


def test_safetensors_and_npy(path: Path) -> None:
    expected = stock_load(path)
    assert extract(path, "model", "-o", "model.safetensors").exit_code == 0
    found = load_file("model.safetensors")
    assert found.keys() == expected["model"].keys()
    assert all(torch.equal(found[name], expected["model"][name]) for name in found)
    assert extract(path, "view", "-o", "view.safetensors").exit_code == 0
    assert torch.equal(load_file("view.safetensors")["view"], BIG[:2, :5])
    assert extract(path, "model.tied", "-o", "tied.npy").exit_code == 0
    assert np.array_equal(np.load("tied.npy"), expected["model"]["tied"].detach().numpy())


@pytest.mark.parametrize(
    ("names", "output"), [(["model"], "x.npy"), (["half"], "x.npy"), (["epoch"], "x.safetensors")]
)
def test_what_a_format_cannot_hold(path: Path, names: list[str], output: str) -> None:
    before = sorted(os.listdir())
    assert "write a .pt file" in fail("extract", path, *names, "-o", output)
    assert sorted(os.listdir()) == before


def test_standard_output(path: Path) -> None:
    with Path("piped.pt").open("wb") as piped:
        code = "from ptsave.__main__ import main; main()"
        process = WarmProcess(code, "extract", path, "model.a.bias", "-o", "-", stdout=piped)
        assert process.wait() == 0
    assert torch.equal(stock_load("piped.pt"), torch.zeros(3))


def test_nothing_is_overwritten_without_force(path: Path) -> None:
    Path("model.pt").write_text("precious")
    for output in ("model.pt", "checkpoint.pt"):
        assert "--force" in fail("extract", path, "model", "-o", output)
    assert Path("model.pt").read_text() == "precious"
    assert extract(path, "model", "--force").exit_code == 0
    assert stock_load("model.pt").keys() == checkpoint()["model"].keys()


OUTPUTS = ["out.pt", "out.safetensors", "out.npy"]


@pytest.mark.parametrize("output", OUTPUTS)
def test_nothing_is_left_behind(path: Path, output: str) -> None:
    assert extract(path, "view", "-o", f"missing/{output}").exit_code == 2
    assert not Path("missing").exists()


@pytest.mark.parametrize("output", OUTPUTS)
def test_full_disk(path: Path, output: str) -> None:
    """The system refuses files of this size, as it does on a full disk."""
    big = torch.arange(100_000.0)
    torch.save({"big": big}, "big.pt")
    Path(output).write_bytes(b"precious")
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    code = limit + "from ptsave.__main__ import main; main()"
    before = sorted(os.listdir())
    result = run_warm(code, "extract", "big.pt", "big", "-f", "-o", output, check=False)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"ptsave: {output}: ")
    assert "File too large" in result.stderr
    assert sorted(os.listdir()) == before
    assert Path(output).read_bytes() == b"precious"


@pytest.mark.parametrize("output", OUTPUTS)
def test_link_stays_and_its_target_is_replaced(path: Path, output: str) -> None:
    Path("folder").mkdir()
    Path("folder/real").write_bytes(b"old")
    Path("folder/real").chmod(0o640)
    Path(output).symlink_to("folder/real")
    assert extract(path, "view", "-f", "-o", output).exit_code == 0
    assert Path(output).is_symlink()
    assert Path("folder/real").stat().st_mode & 0o7777 == 0o640
    assert os.listdir("folder") == ["real"]
    assert Path("folder/real").read_bytes() != b"old"


@pytest.mark.parametrize("output", OUTPUTS)
def test_mode_is_that_of_the_umask(path: Path, output: str) -> None:
    before = os.umask(0o027)
    try:
        assert extract(path, "view", "-o", output).exit_code == 0
    finally:
        os.umask(before)
    assert os.stat(output).st_mode & 0o7777 == 0o640


def test_npy_files_are_those_of_numpy(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    tensors = {
        "plain": base,
        "fortran": base.permute(2, 1, 0),
        "neither": base.transpose(0, 1),
        "strided": base[..., ::2],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex128),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "part": base[1],
        "unsigned": torch.ones(2, dtype=torch.uint64),
    }
    for name, tensor in tensors.items():
        write_entries({name: tensor}, str(tmp_path / "ours.npy"), overwrite=True)
        np.save(tmp_path / "stock.npy", tensor.resolve_conj().numpy())
        ours = (tmp_path / "ours.npy").read_bytes()
        assert ours == (tmp_path / "stock.npy").read_bytes(), name


def test_safetensors_have_values_as_they_are_meant(path: Path) -> None:
    values = torch.randn(3, 4, dtype=torch.complex64)
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    tensors = {"conjugate": values.conj(), "negative": negative, "turned": values.t()}
    torch.save({"all": tensors}, "complex.pt")
    assert extract("complex.pt", "all", "-o", "all.safetensors").exit_code == 0
    found = load_file("all.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_safetensors_files_are_those_of_the_library(path: Path) -> None:
    for names in (["model"], ["view"], ["half", "model.a.bias"]):
        assert extract(path, *names, "-f", "-o", "ours.safetensors").exit_code == 0
        found = load_file("ours.safetensors")
        ptsave.save_model(found, "expected.safetensors")
        assert Path("ours.safetensors").read_bytes() == Path("expected.safetensors").read_bytes()


def test_missing_and_ambiguous_names(path: Path) -> None:
    assert "did you mean 'model'?" in fail("extract", path, "modle")
    result = extract(path, "a.b")
    assert "ask for ('a', 'b') or ('a.b',)" in result.stderr
    assert extract(path, "('a.b',)", "-o", "flat.pt").exit_code == 0
    assert torch.equal(stock_load("flat.pt"), torch.zeros(1))


def test_damaged_tensor(path: Path) -> None:
    flip(path, offset_of(path, "model.a.bias"))
    assert "--no-verify" in fail("extract", path, "model.a.bias", "-o", "bias.pt")
    assert not Path("bias.pt").exists()
    assert extract(path, "model.a.weight", "-o", "weight.pt").exit_code == 0
    assert extract(path, "model.a.bias", "-o", "bias.pt", "--no-verify").exit_code == 0
    bias: Tensor = stock_load("bias.pt")
    assert bias[1:].tolist() == [0.0, 0.0]
    assert bias[0] != 0


def test_everything_that_is_whole(path: Path) -> None:
    expected = stock_load(path)
    flip(path, offset_of(path, "model.a.bias"))
    result = extract(path, "--whole", "-o", "rest.pt")
    assert (result.exit_code, result.stderr) == (
        0,
        "ptsave: left out, because damaged or not built: model.a.bias\n",
    )
    del expected["model"]["a.bias"]
    rest = stock_load("rest.pt")
    assert torch.equal(rest.pop("view"), expected["view"])  # without the rest of its storage
    assert_same_object(rest, {name: expected[name] for name in rest})
    found = json_of("extract", path, "--whole", "-o", "rest.pt", "--force")
    assert (found["entries"], found["left_out"]) == ([*expected], ["model.a.bias"])


def test_everything_of_shards_that_is_whole(tmp_path: Path) -> None:
    """A file of the safetensors library has no checksums: all of it counts as whole."""
    tensors = {"a": torch.ones(3), "b": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    entries, lost = read_whole(tmp_path)
    assert lost == []
    assert_same_object(entries, tensors)
    (tmp_path / "model.safetensors").unlink()
    for name, tensor in tensors.items():
        torch.save({name: tensor}, tmp_path / f"pytorch_model-{name}.bin")
    flip(tmp_path / "pytorch_model-b.bin", offset_of(tmp_path / "pytorch_model-b.bin", "b"))
    entries, lost = read_whole(tmp_path)
    assert (list(entries), lost) == (["a"], ["b"])


def test_what_is_whole_of_other_containers(tmp_path: Path) -> None:
    """A list keeps its places or goes; state dicts keep their attributes."""
    path = tmp_path / "c.pt"
    net = torch.nn.Linear(2, 2)
    loop: dict[str, Any] = {"x": torch.ones(1)}
    loop["self"] = loop
    obj = {
        "net": net.state_dict(),
        "pair": [torch.ones(3), {"deep": torch.zeros(3)}],
        "all of it": {"only": torch.full((5,), 5.0)},
        "loop": loop,
        "n": 1,
    }
    torch.save(obj, path)
    for name in ("net.bias", "pair.1.deep", "all of it.only"):
        flip(path, offset_of(path, name))
    entries, lost = read_whole(path)
    assert lost == ["net.bias", "pair", "all of it.only"]
    assert list(entries) == ["net", "loop", "n"]
    assert list(entries["net"]) == ["weight"]
    assert vars(entries["net"]) == vars(obj["net"])  # their _metadata, and nothing else
    assert entries["loop"]["self"] is entries["loop"]
    torch.save([torch.ones(2)], path)
    with pytest.raises(TypeError, match="holds list, not a dict"):
        read_whole(path)


@pytest.mark.parametrize(
    "arguments",
    [[], ["model", "--whole", "-o", "x.pt"], ["--whole"], ["--whole", "--no-verify", "-o", "x.pt"]],
    ids=" ".join,
)
def test_names_or_all_that_is_whole(path: Path, arguments: list[str]) -> None:
    assert "--whole" in fail("extract", path, *arguments)


def test_completion_of_names(path: Path) -> None:
    complete = ShellComplete(commands, {}, "ptsave", "_PTSAVE_COMPLETE")
    found = complete.get_completions(["extract", str(path)], "model.a")
    assert [item.value for item in found] == ["model.a.weight", "model.a.bias"]
    (item,) = complete.get_completions(["extract"], "che")
    assert (item.type, item.value) == ("file", "che")  # which the shell completes itself
