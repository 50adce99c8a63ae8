"""FSDP2 on several ranks: each saves its part, and a step counts when all parts are there.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Run it twice: the second run goes on from the first one's last step. At the end the model is saved
by torch.distributed.checkpoint, through ptsave, for any other number of ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ptsave
import ptsave.distributed


def train(directory: str, n_steps: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)  # from here on a rank has its part of each parameter
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # Every rank makes the checkpointer, restores and saves; each file is one rank's part.
    with ptsave.AsyncCheckpointer(directory, keep=2) as checkpointer:
        first = 0
        if checkpointer.latest():
            first = checkpointer.restore(model=model, optimizer=optimizer)["step"] + 1
            if rank == 0:
                print(f"going on at step {first}")
        for step in range(first, first + n_steps):
            inputs = torch.randn(32, 16)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 4:
                checkpointer.save(step, model=model, optimizer=optimizer, step=step)

    # One checkpoint of whole tensors, for any number of ranks and for `ptsave ls`.
    dcp.save(  # type: ignore[attr-defined]  # torch does not say that it exports it
        {"model": model.state_dict()},
        storage_writer=ptsave.distributed.StorageWriter(f"{directory}/model"),
    )
    if rank == 0:
        with ptsave.open(f"{directory}/model") as archive:
            print("model.0.weight", tuple(archive.info("model.0.weight").shape))
            for chunk in archive.info("model.0.weight").chunks:
                print("  rows from", chunk.offsets[0], "in", chunk.file)


if __name__ == "__main__":
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--directory", default="fsdp2-checkpoints")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    launched = not dist.is_initialized()
    if launched:
        dist.init_process_group("gloo")
    train(arguments.directory, arguments.steps)
    if launched:
        dist.destroy_process_group()
