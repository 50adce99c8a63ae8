"""`ptsave globals`: what torch says that a file needs, without running anything of it."""

from __future__ import annotations

import collections
import datetime
import fractions
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from command_line import fail, run
from safetensors.torch import save_file
from stock_comparison import deflated, stock_load

from ptsave.inspection.pickle_globals import code_to_allow, required_globals, unsafe_globals

stock_globals = torch.serialization.get_unsafe_globals_in_checkpoint


class Runs:
    """An object that is built by calling what is given."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], tuple(self.call[1:])


OBJECTS: dict[str, Any] = {
    "tensors": {"t": torch.ones(2), "p": torch.nn.Parameter(torch.ones(1))},
    "containers": {"set": {1}, "ordered": collections.OrderedDict(a=1), "range": range(3)},
    "classes": [Path("x"), fractions.Fraction(1, 2), datetime.timedelta(1)],
    "module": torch.nn.Linear(1, 1),
    "nothing": None,
}


globals_of = partial(run, "globals")


@pytest.mark.parametrize("name", OBJECTS)
def test_as_torch_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(OBJECTS[name], path)
    expected = sorted(stock_globals(path))
    assert unsafe_globals(required_globals(path)) == expected
    result = globals_of(path)
    assert result.exit_code == (1 if expected else 0)
    for each in expected:
        assert f"not allowed    {each}\n" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("protocol", [0, 3, 4, 5])
def test_other_protocols_name_the_same(name: str, protocol: int, tmp_path: Path) -> None:
    """torch reads only protocol 2 here."""
    usual, other = tmp_path / "usual.pt", tmp_path / "other.pt"
    torch.save(OBJECTS[name], usual)
    torch.save(OBJECTS[name], other, pickle_protocol=protocol)
    needed = set(unsafe_globals(required_globals(usual)))
    found = set(unsafe_globals(required_globals(other)))
    builtins = {each for each in found ^ needed if not each.startswith(("builtins.", "copyreg."))}
    assert not builtins


def test_the_code_allows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"f": fractions.Fraction(1, 2), "d": datetime.timedelta(1)}, path)
    needed = required_globals(path)
    with pytest.raises(pickle.UnpicklingError):
        stock_load(path, weights_only=True)
    code = code_to_allow({name: needed[name] for name in unsafe_globals(needed)})
    assert code.splitlines()[1] in globals_of(path).stdout
    exec(code)
    assert stock_load(path, weights_only=True)["d"] == datetime.timedelta(1)
    assert globals_of(path).exit_code == 0  # those that the user has allowed


def test_nothing_runs_and_what_is_never_allowed(tmp_path: Path) -> None:
    path, mark = tmp_path / "file.pt", tmp_path / "mark"
    import os

    torch.save(Runs(os.mkdir, str(mark)), path)
    result = globals_of(path)
    assert result.exit_code == 1
    assert "never allowed  posix.mkdir" in result.stdout
    assert "add_safe_globals" not in result.stdout
    assert not mark.exists()


def test_all(tmp_path: Path) -> None:
    torch.save(OBJECTS["tensors"], tmp_path / "file.pt")
    result = globals_of("--all", tmp_path / "file.pt")
    assert result.exit_code == 0
    assert "allowed        torch._utils._rebuild_tensor_v2" in result.stdout


def containers(tmp_path: Path) -> Iterator[str]:
    path, packed = tmp_path / "file.pt", tmp_path / "packed.pt"
    torch.save([Path("x"), torch.ones(2)], path)
    packed.write_bytes(deflated(path.read_bytes()))
    with fsspec.open("memory://globals/file.pt", "wb") as stream:
        stream.write(path.read_bytes())
    torch.save(
        [Path("x"), torch.ones(2)], tmp_path / "old.pt", _use_new_zipfile_serialization=False
    )
    yield from (str(path), str(packed), "memory://globals/file.pt", str(tmp_path / "old.pt"))


def test_every_kind_of_file(tmp_path: Path) -> None:
    for path in containers(tmp_path):
        assert unsafe_globals(required_globals(path)) == [
            f"{type(tmp_path).__module__}.PosixPath"
        ], path


def test_files_without_pickles(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert globals_of(tmp_path / "model.safetensors").exit_code == 0
    (tmp_path / "page.pt").write_text("<html>")
    assert globals_of(tmp_path).exit_code == 0  # the model in the directory is that file


def test_damaged_pickle(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(OBJECTS["classes"], path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for end in range(30, 200, 7):
        path.write_bytes(data[:end])
        fail("globals", path)
