"""The environment variables: those set to nothing, and those that nothing can be made of."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

import ptsave
from ptsave.support import config

NUMBERS = ["PTSAVE_NUM_THREADS", "PTSAVE_MAX_PINNED_BYTES", "PTSAVE_MAX_STAGED_BYTES"]
SWITCHES = ["PTSAVE_DIRECT_IO", "PTSAVE_VERIFY"]


@pytest.mark.parametrize("variable", [*NUMBERS, *SWITCHES])
def test_an_empty_variable_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    unset = config.current()
    monkeypatch.setenv(variable, "")
    assert config.current() == unset
    ptsave.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    ptsave.async_save({"a": torch.ones(3)}, tmp_path / "b.pt").result()
    for name in ("a.pt", "b.pt"):
        assert torch.equal(ptsave.load(tmp_path / name)["a"], torch.ones(3))


MALFORMED = ["0", "-1", " ", "1.5", "8GB", "0x10", "1_000", "²", "٣", str(1 << 63), "9" * 5000]


@pytest.mark.parametrize("variable", NUMBERS)
@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: value[:20])
def test_what_is_no_positive_integer(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    message = f"^{variable} must be a positive integer, not '"
    with pytest.raises(ValueError, match=message) as caught:
        config.current()
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("variable", SWITCHES)
@pytest.mark.parametrize("value", ["false", "off", "no", "2", "00", "-0", " "])
def test_what_is_no_switch(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable} must be 0 or 1, not {value!r}$"):
        config.current()


def test_numbers_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in NUMBERS:
        monkeypatch.setenv(variable, "0017")
    for variable in SWITCHES:
        monkeypatch.setenv(variable, "0")
    found = config.current()
    assert (found.n_threads, found.max_pinned_nbytes, found.max_staged_nbytes) == (17, 17, 17)
    assert not found.direct_io
    assert not found.verify
    for variable in SWITCHES:
        monkeypatch.setenv(variable, "1")
    assert config.current().direct_io
    assert config.current().verify


@pytest.mark.parametrize("variable", NUMBERS[:2])
def test_a_malformed_variable_stops_a_save_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    monkeypatch.setenv(variable, "two")
    for save in (ptsave.save, lambda *args: ptsave.async_save(*args).result()):
        with pytest.raises(ValueError, match=f"{variable} must be a positive integer, not 'two'"):
            save({"a": torch.ones(3)}, path)
    with pytest.raises(ValueError, match=variable):
        ptsave.save(torch.ones(3), io.BytesIO())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.pt"]


def test_ranks_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together they pin and stage no more by default than it has."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    pinned = config.current().max_pinned_nbytes
    staged = config.share_nbytes(config.local_world_size()) // 2
    assert 8 * (pinned + staged) <= config.limit_nbytes()
