"""Serving: the shards of a published model fill a model, without a second copy in memory.

    pip install "ptsave[safetensors]"
    python examples/serving.py

The checkpoint has a gate projection and an up projection. The model packs them into one matrix, as
inference engines do. It is made on the meta device and loaded in another dtype.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import ptsave

WIDTH, HIDDEN = 64, 128


class TrainedMLP(nn.Module):
    """A layer as it was trained and published."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        out: torch.Tensor = self.down_proj(hidden)
        return out


class ServedMLP(nn.Module):
    """The same layer with one matrix product less."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return out


def main(folder: Path) -> None:
    torch.manual_seed(0)
    trained = nn.Sequential(*(TrainedMLP() for _ in range(4)))
    ptsave.save_model(trained, folder, max_shard_size="200KB")
    print(*sorted(path.name for path in folder.iterdir()), sep="\n")

    with torch.device("meta"):  # shapes without memory
        served = nn.Sequential(*(ServedMLP() for _ in range(4)))
    ptsave.load_model(
        served,
        folder,
        packed_modules_mapping={"gate_up_proj": ["gate_proj", "up_proj"]},
        device="cpu",
        dtype=torch.bfloat16,
    )

    x = torch.randn(2, WIDTH)
    expected, found = trained(x), served(x.bfloat16()).float()
    error = ((expected - found).norm() / expected.norm()).item()
    print(f"relative error of the outputs, by bfloat16: {error:.1%}")
    assert error < 0.05


if __name__ == "__main__":
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--folder", type=Path, default=Path("served-model"))
    main(parser.parse_args().folder)
