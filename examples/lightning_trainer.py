"""Lightning: a plug-in writes checkpoints in the background, and checks them during a load.

    pip install "ptsave[lightning]"
    python examples/lightning_trainer.py

The files are Lightning's own, byte for byte: a Trainer without the plug-in reads them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ptsave.integrations.lightning import AsyncCheckpointIO


class Regression(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(folder: Path, n_epochs: int) -> lightning.Trainer:
    """Return a Trainer whose checkpoints ptsave writes."""
    plug_in: Any = AsyncCheckpointIO(fsync=True)
    return lightning.Trainer(
        max_epochs=n_epochs,
        accelerator="cpu",
        default_root_dir=folder,
        plugins=[plug_in],
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(folder: Path) -> None:
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=64)

    trainer(folder, 2).fit(Regression(), data)
    print("trained two epochs:", *sorted(path.name for path in folder.glob("*.ckpt")))

    resumed = trainer(folder, 3)
    resumed.fit(Regression(), data, ckpt_path=folder / "last.ckpt")
    print("went on, and ended at epoch", resumed.current_epoch)


if __name__ == "__main__":
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--folder", type=Path, default=Path("lightning-checkpoints"))
    main(parser.parse_args().folder)
