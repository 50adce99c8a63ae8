"""Capture and diff: record two runs of a model, and find the first value that differs.

    python examples/capture_and_diff.py

Here the second run has bfloat16 in one layer. In practice the difference may be a new kernel,
another machine, torch.compile or a new version of a library.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import ptsave


class Rounded(nn.Linear):
    """A linear layer that computes in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.bfloat16(), self.bias.bfloat16()
        return nn.functional.linear(x.bfloat16(), weight, bias).float()


def record(path: Path, linear: type[nn.Linear]) -> None:
    """Train three steps, and record everything that goes through the layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ptsave.capture(model, path, optimizer=optimizer):  # counts the steps
        for _ in range(3):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    record(folder / "a.pt", nn.Linear)
    record(folder / "b.pt", Rounded)

    with ptsave.open(folder / "a.pt") as run:
        print(run.summary())

    found = ptsave.compare_captures(folder / "a.pt", folder / "b.pt")
    assert not found.equal
    assert found.first is not None
    assert found.first.numbers is not None
    print("the first difference:", found.first.name)
    print(f"by at most {found.first.numbers.max_abs:.4f}; the same on the command line:")
    print(f"  ptsave diff {folder / 'a.pt'} {folder / 'b.pt'} --capture")


if __name__ == "__main__":
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--folder", type=Path, default=Path("captures"))
    main(parser.parse_args().folder)
