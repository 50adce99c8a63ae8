"""Every dtype of the installed torch goes through every table of dtypes (CONTRIBUTING.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import _TYPES
from stock_comparison import assert_same_object, saved_bytes

import ptsave
from ptsave.contents.safetensors_fields import DTYPES

_PLAIN = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    # The names of dtypes that have bits only, of less than a byte, and quantized ones.
    if isinstance(each, torch.dtype) and not re.match(r"torch\.(bits|u?int[1-7]$|q)", str(each))
}


def _tensor(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(64, dtype=torch.uint8)
    return values % 2 == 0 if dtype == torch.bool else values.view(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", _PLAIN)
def test_every_table_has_it(name: str, tmp_path: Path) -> None:
    tensor, path = _tensor(_PLAIN[name]), tmp_path / "model.pt"
    assert saved_bytes(ptsave.save, [tensor]) == saved_bytes(torch.save, [tensor])
    torch.save([tensor], path)
    assert_same_object(ptsave.load(path), [tensor])
    with ptsave.open(path) as archive:
        assert archive.info("0").dtype == tensor.dtype
    assert ptsave.compare(path, path).equal


@pytest.mark.parametrize("name", _PLAIN)
def test_statistics(name: str, tmp_path: Path) -> None:
    model = torch.nn.Identity()
    with ptsave.capture(model, tmp_path / "run.pt", what=("outputs",), tensors=False):
        model(_tensor(_PLAIN[name]))
    with ptsave.open(tmp_path / "run.pt") as run:
        (value,) = run.captured_values()
        assert value.statistics is not None


def test_safetensors() -> None:
    """The library's dtypes are the same, apart from those that this torch lacks."""
    ours = {getattr(torch, name, None) for name in DTYPES.values()}
    assert {each for each in _TYPES.values() if isinstance(each, torch.dtype)} <= ours
