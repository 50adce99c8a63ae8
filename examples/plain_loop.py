"""Your own training loop: checkpoints in the background, resumed exactly after a crash.

    python examples/plain_loop.py          # stop it with Ctrl-C or kill -9, and start it again

When a cluster ends it by a signal, it saves and exits with status 75: it has to be run again.

The checkpoint holds everything that decides the next step: weights, the optimizer's state, the
learning rate, the state of the random number generator, and the step. The step gives the position
in the epoch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional

import ptsave

N_ROWS, BATCH = 2048, 64
STOP_SIGNALS = [signal.SIGTERM, signal.SIGUSR1]


def rows_of(epoch: int) -> torch.Tensor:
    """Return the order of an epoch's rows, the same whenever it is asked for."""
    return torch.randperm(N_ROWS, generator=torch.Generator().manual_seed(epoch))


def train(directory: str, n_steps: int, save_every: int) -> bool:
    """Train, and return whether all steps are done."""
    torch.manual_seed(0)
    inputs = torch.randn(N_ROWS, 16)
    targets = inputs.square().sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.05), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=200, gamma=0.5)
    loss = torch.zeros(())

    with ptsave.AsyncCheckpointer(directory, keep=2, stop_signals=STOP_SIGNALS) as checkpointer:
        first = 0
        if checkpointer.latest():
            rest = checkpointer.restore(model=model, optimizer=optimizer, scheduler=scheduler)
            first = rest["step"] + 1
            torch.set_rng_state(rest["rng"])  # for the dropout
            print(f"going on at step {first}")

        for step in range(first, n_steps):
            epoch, batch = divmod(step, N_ROWS // BATCH)
            rows = rows_of(epoch)[batch * BATCH : (batch + 1) * BATCH]
            loss = functional.mse_loss(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            is_stopping = checkpointer.stop_requested()
            if is_stopping or step % save_every == save_every - 1:
                checkpointer.save(
                    step,
                    model=model,
                    optimizer=optimizer,
                    scheduler=scheduler,
                    step=step,
                    rng=torch.get_rng_state(),
                )
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if is_stopping:
                return step == n_steps - 1
    return True


if __name__ == "__main__":
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--directory", default="checkpoints")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=100)
    arguments = parser.parse_args()
    if not train(arguments.directory, arguments.steps, arguments.save_every):
        sys.exit(os.EX_TEMPFAIL)
