"""The options of a place and of new names have two names each, and all that loads takes both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ptsave

Call = Callable[..., Any]


def _calls(folder: Path) -> dict[str, Call]:
    """Return functions that load a layer's weights under new names, or to a place."""
    saved = nn.Linear(2, 3)
    ptsave.save(saved.state_dict(), folder / "state.pt")
    ptsave.save_checkpoint(folder / "checkpoint.pt", model=saved)
    ptsave.save_model(saved, folder / "model.safetensors")
    run = ptsave.AsyncCheckpointer(folder / "run")
    run.save(1, model=saved).result()

    def inside(name: str) -> Call:
        def read(**options: Any) -> Any:
            with ptsave.open(folder / "state.pt") as archive:
                result = getattr(archive, name)("weight", **options)
                return result if isinstance(result, torch.Tensor) else result[:]

        return read

    return {
        "load": lambda **options: ptsave.load(folder / "state.pt", **options)["weight"],
        "load_into": lambda **options: ptsave.load_into(folder / "state.pt", _Renamed(), **options),
        "load_checkpoint": lambda **options: ptsave.load_checkpoint(
            folder / "checkpoint.pt", model=_Renamed(), **options
        ),
        "restore": lambda **options: run.restore(model=_Renamed(), **options),
        "load_model": lambda **options: ptsave.load_model(
            _Renamed(), folder / "model.safetensors", **options
        ),
        "iter_weights": lambda **options: dict(
            ptsave.iter_weights(folder / "model.safetensors", **options)
        ),
        "get_tensor": inside("get_tensor"),
        "get_slice": inside("get_slice"),
    }


class _Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)


RENAMING = ["load_into", "load_checkpoint", "restore", "load_model", "iter_weights"]
PLACING = ["load", "iter_weights", "get_tensor", "get_slice"]


def _under_layer(name: str) -> str:
    return f"layer.{name}"


@pytest.mark.parametrize("function", RENAMING)
def test_new_names(tmp_path: Path, function: str) -> None:
    call = _calls(tmp_path)[function]
    ways = [call(**{name: _under_layer}) for name in ("rename", "key_mapping")]
    if function == "iter_weights":
        assert ways[0].keys() == ways[1].keys() == {"layer.weight", "layer.bias"}
    with pytest.raises(TypeError, match="two names of one option: give one of them"):
        call(rename=_under_layer, key_mapping=_under_layer)


@pytest.mark.parametrize("function", PLACING)
@pytest.mark.parametrize("name", ["device", "map_location"])
def test_a_place(tmp_path: Path, function: str, name: str) -> None:
    result = _calls(tmp_path)[function](**{name: "meta"})
    tensor = result["weight"] if isinstance(result, dict) else result
    assert tensor.device.type == "meta"


@pytest.mark.parametrize("function", [*RENAMING, *PLACING])
def test_both_names_of_a_place(tmp_path: Path, function: str) -> None:
    with pytest.raises(TypeError, match="two names of one option: give one of them"):
        _calls(tmp_path)[function](device="cpu", map_location="cpu")


@pytest.mark.parametrize("function", ["load_into", "load_checkpoint", "restore", "load_model"])
@pytest.mark.parametrize("name", ["device", "map_location"])
def test_a_place_of_a_restore(tmp_path: Path, function: str, name: str) -> None:
    _calls(tmp_path)[function](rename=_under_layer, **{name: "cpu"})


def test_a_place_that_is_none(tmp_path: Path) -> None:
    """A target may have been meant."""
    calls = _calls(tmp_path)
    for function in ("load", "load_into", "load_checkpoint", "restore"):
        with pytest.raises(TypeError, match="device must be a device or its name, not dict"):
            calls[function](device={})
