"""Checksums in safetensors files: kinds of targets, of sources and of models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from command_line import run, succeed
from safetensors.torch import load_file, save_file
from test_checksums import KEY, Model, expected_digits, parts_of, same_bits
from torch import Tensor, nn

import ptsave
from ptsave import CorruptCheckpointError


def with_changed_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def assert_checked(data: bytes) -> None:
    assert parts_of(data)[0][KEY] == expected_digits(data)


def large_tensors(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"a": torch.randn(5 << 20), "b": torch.randn(3), "c": torch.randn(7 << 18)}


READERS: dict[str, Callable[[str, dict[str, Tensor]], object]] = {
    "load": lambda url, _: ptsave.load(url),
    "load_into": lambda url, tensors: ptsave.load_into(
        url, {name: torch.zeros_like(each) for name, each in tensors.items()}
    ),
    "open": lambda url, _: [file[name] for file in [ptsave.open(url)] for name in file],
    "iter_weights": lambda url, _: [*ptsave.iter_weights(url)],
    "load_model": lambda url, tensors: ptsave.load_model(Model(tensors), url),
    "verify": lambda url, _: ptsave.open(url).verify(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_changed_bit_at_a_url_is_found(reader: str) -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(7)}
    url = f"memory://checksums/{reader.replace(' ', '_')}.safetensors"
    ptsave.save_model(tensors, url)
    files = fsspec.filesystem("memory")
    data = files.cat(url)
    READERS[reader](url, tensors)
    files.pipe(url, with_changed_bit(data))
    with pytest.raises(CorruptCheckpointError, match="checksum") as caught:
        READERS[reader](url, tensors)
    assert caught.value.entries == [parts_of(data)[1][-1][0]]


def test_convert_to_and_from_urls(tmp_path: Path) -> None:
    tensors = large_tensors(0)
    torch.save(tensors, tmp_path / "a.pt")
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path / "a.pt"), "/checksums/a.pt")
    ptsave.convert("memory://checksums/a.pt", "memory://checksums/b.safetensors")
    data = files.cat("/checksums/b.safetensors")
    assert_checked(data)
    files.pipe("/checksums/c.safetensors", with_changed_bit(data))
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        ptsave.convert("memory://checksums/c.safetensors", tmp_path / "d.safetensors")
    assert not (tmp_path / "d.safetensors").exists()


def test_a_target_that_cannot_be_replaced(tmp_path: Path) -> None:
    """Files that are written in place get their header last, too."""
    tensors = large_tensors(1)
    ptsave.save_model(large_tensors(0), tmp_path / "a.safetensors")
    with open(tmp_path / "a.safetensors", "r+b") as file:
        (tmp_path / "link.safetensors").symlink_to(f"/proc/self/fd/{file.fileno()}")
        ptsave.save_model(tensors, tmp_path / "link.safetensors")
    assert_checked((tmp_path / "a.safetensors").read_bytes())
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], tensors["a"])


def test_the_target_is_the_source(tmp_path: Path) -> None:
    """The tensors to save are maps of the file that they replace."""
    path = tmp_path / "a.safetensors"
    tensors = large_tensors(2)
    save_file(tensors, path)
    ptsave.save_model(ptsave.load(path, mmap=True), path)
    data = path.read_bytes()
    assert_checked(data)
    with pytest.raises(FileExistsError, match="the source itself"):
        ptsave.convert(path, path, force=True)
    assert path.read_bytes() == data
    assert all(same_bits(each, tensors[name]) for name, each in ptsave.load(path).items())


def test_two_savers_of_one_path(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    models = [large_tensors(3), large_tensors(4)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            [*pool.map(lambda each: ptsave.save_model(each, path), models)]
            assert_checked(path.read_bytes())
            found = ptsave.load(path)
            assert any(all(same_bits(found[name], each[name]) for name in each) for each in models)


_SAVER = """
import sys, torch, ptsave
torch.set_num_threads(1)
tensors = [{"a": torch.full((6 << 20,), float(i)), "b": torch.ones(9)} for i in range(2)]
print("ready", flush=True)
while True:
    for each in tensors:
        ptsave.save_model(each, sys.argv[1])
"""


def test_a_kill_leaves_a_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    ptsave.save_model({"a": torch.zeros(6 << 20), "b": torch.ones(9)}, path)
    for delay in (0.0, 0.011, 0.023, 0.037):
        saver = subprocess.Popen([sys.executable, "-c", _SAVER, path], stdout=subprocess.PIPE)
        with saver:
            assert saver.stdout is not None
            assert saver.stdout.readline() == b"ready\n"
            time.sleep(delay)
            os.kill(saver.pid, signal.SIGKILL)
        ptsave.load(path)
        assert_checked(path.read_bytes())


def test_tied_weights_and_extra_state(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.state = torch.arange(3.0)

        def get_extra_state(self) -> Tensor:
            return self.state

        def set_extra_state(self, state: Tensor) -> None:
            self.state = state

    saved, loaded = Tied(), Tied()
    ptsave.save_model(saved, tmp_path / "a.safetensors")
    assert_checked((tmp_path / "a.safetensors").read_bytes())
    loaded.state = torch.zeros(3)
    ptsave.load_model(loaded, tmp_path / "a.safetensors")
    assert torch.equal(loaded.second.weight, saved.first.weight)
    assert torch.equal(loaded.state, saved.state)


def test_only_empty_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.empty(0), "b": torch.empty(3, 0)}
    path = tmp_path / "a.safetensors"
    ptsave.save_model(tensors, path)
    assert_checked(path.read_bytes())
    assert ptsave.load(path).keys() == load_file(path).keys()
    succeed("verify", path)


def test_many_small_tensors(tmp_path: Path) -> None:
    tensors = {f"t{i:06}": torch.full((2,), float(i)) for i in range(100_000)}
    path = tmp_path / "a.safetensors"
    ptsave.save_model(tensors, path)
    data = path.read_bytes()
    assert_checked(data)
    path.write_bytes(with_changed_bit(data))
    with pytest.raises(CorruptCheckpointError) as caught:
        ptsave.load(path)
    assert caught.value.entries == ["t099999"]


def test_verify_of_a_directory_says_which_file_has_no_checksums(tmp_path: Path) -> None:
    ptsave.save_model({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "b.safetensors")
    lines = succeed("verify", tmp_path).stdout.splitlines()
    assert ["no checksums" in line for line in lines if ".safetensors" in line] == [False, True]


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_verify_compares_although_loads_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ones = torch.ones(30)
    ptsave.save_model({"a": ones}, tmp_path / "a.safetensors")
    ptsave.save({"a": ones}, tmp_path / "a.pt")
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data.replace(ones.numpy().tobytes(), bytes(ones.nbytes)))
    monkeypatch.setenv("PTSAVE_VERIFY", "0")
    assert torch.equal(ptsave.load(tmp_path / name)["a"], torch.zeros(30))
    result = run("verify", tmp_path / name)
    assert result.exit_code == 1
    assert "damaged: a" in result.stdout


@pytest.mark.parametrize("value", ["1", "null", '["0"]', '{"a": "00000000"}'])
def test_checksums_that_are_no_text(tmp_path: Path, value: str) -> None:
    """The safetensors library refuses metadata whose values are not text."""
    text = (
        f'{{"__metadata__":{{"{KEY}":{value}}},'
        '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    ).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CorruptCheckpointError):
        ptsave.load(path)
    assert run("verify", path).exit_code == 1


def test_a_stale_entry_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    ptsave.save_model({"a": torch.ones(3)}, path)
    save_file({"a": torch.zeros(3)}, path, parts_of(path.read_bytes())[0])
    with pytest.raises(CorruptCheckpointError, match="PTSAVE_VERIFY=0"):
        ptsave.load(path)
    assert torch.equal(ptsave.load(path, verify=False)["a"], torch.zeros(3))
