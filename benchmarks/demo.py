"""`make demo`: the checkpoint of a real training step, through torch and through ptsave.

Trains one AdamW step of a model with GPT-2 small's shapes, saves and loads the checkpoint with
both libraries, compares the files byte for byte and the loaded tensors with the trained ones, and
prints how long calls take as users meet them: each is the first of a fresh process, after a rest.
The exit status is non-zero if anything differs.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import works
from benchmarks._program import ROOT, compile_modules
from benchmarks.as_found import HERE, TORCH, Machine
from ptsave.bench.system import AS_FOUND

VOCABULARY = 50257
CONTEXT = 1024
WIDTH = 768
HEADS = 12
LAYERS = 12
BATCH = (2, 64)
ROUNDS = 3
MAX_SECONDS = 30  # no further round starts after so long
REST_SECONDS = 2.0
OPERATIONS = {"save": works.SAVE, "save + fsync": works.SAVE_DURABLE, "load": works.LOAD}

Seconds = dict[tuple[str, str], list[float]]  # by library and work


# ---------------------------------------------------------------------------------------- the model


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.c_attn(x).view(batch, length, 3 * HEADS, -1).transpose(1, 2)
        query, key, value = parts.chunk(3, dim=1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.c_proj(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Decoder(nn.Module):
    """A language model with GPT-2 small's shapes; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def train_one_step() -> dict[str, Any]:
    """Return the checkpoint of a model after one real step, as a training script would make it."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(VOCABULARY, BATCH)
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 1,
        "loss": loss.item(),
        "rng_state": torch.get_rng_state(),
    }


# --------------------------------------------------------------------------------------- comparing


def storages_of(value: object) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of every tensor in a checkpoint; shared ones more than once."""
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from storages_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from storages_of(item)


def nbytes_of(checkpoint: object) -> int:
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages_of(checkpoint)}
    return sum(sizes.values())


def equal(left: object, right: object) -> bool:
    """Tell whether two checkpoints hold the same, down to each bit of each tensor."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        same_keys = list(left) == list(right)
        return same_keys and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


# ----------------------------------------------------------------------------------------- timing


def measure(folder: Path, rounds: int) -> Seconds:
    """Time calls as users meet them: the first of a process, with memory as the system has it."""
    compile_modules()
    machine = Machine(folder, 1.0, REST_SECONDS, {HERE: ROOT})
    seconds: Seconds = {}
    start = time.perf_counter()
    for number in range(1, rounds + 1):
        if number > 1 and time.perf_counter() - start > MAX_SECONDS:
            break
        print(f"Saving and loading with both, round {number} of {rounds} ...", flush=True)
        for work in OPERATIONS.values():
            for who in random.sample((TORCH, HERE), 2):
                taken = machine.measure(who, work, [AS_FOUND])[AS_FOUND]
                seconds.setdefault((who, work), []).append(taken)
    return seconds


def print_table(seconds: Seconds, nbytes: int) -> None:
    print(f"\n  {'':14}{'torch':>18}{'ptsave':>20}{'ratio':>9}")
    for operation, work in OPERATIONS.items():
        stock, ours = median(seconds[TORCH, work]), median(seconds[HERE, work])
        cells = (f"{s:6.2f} s {nbytes / s / 1e9:5.2f} GB/s" for s in (stock, ours))
        print(f"  {operation:14}{'  '.join(cells)}  {stock / ours:6.1f}x")


# ------------------------------------------------------------------------------------------- main


def check(claim: str, holds: bool) -> bool:
    print(f"  {'yes' if holds else 'NO '}  {claim}")
    return holds


def check_all(checkpoint: object, folder: Path) -> bool:
    """Save with both, print what is the same, and return whether everything is."""
    import ptsave

    # One file name in two folders: torch puts the file's name into the file.
    paths = {who: folder / who / works.FILE for who in (TORCH, HERE)}
    for who, save in ((TORCH, torch.save), (HERE, ptsave.save)):
        paths[who].parent.mkdir()
        save(checkpoint, paths[who])
    same = filecmp.cmp(paths[TORCH], paths[HERE], shallow=False)
    verdicts = [check("the two files are identical, byte for byte", same)]
    for who, load, other in ((TORCH, torch.load, HERE), (HERE, ptsave.load, TORCH)):
        claim = f"{who}.load of the other's file gives back what was trained"
        verdicts.append(check(claim, equal(load(paths[other]), checkpoint)))
    paths[HERE].unlink()
    paths[TORCH].rename(folder / works.FILE)
    return all(verdicts)


def run(folder: Path, rounds: int) -> bool:
    print("Training one step of a GPT-2-small-shaped model with AdamW ...", flush=True)
    checkpoint = train_one_step()
    nbytes = nbytes_of(checkpoint)
    print(f"Its checkpoint (model, optimizer, random state): {nbytes / 1e9:.2f} GB of tensors.")
    print("\nIs everything the same?")
    same = check_all(checkpoint, folder)
    del checkpoint
    print()
    seconds = measure(folder, rounds)
    print_table(seconds, nbytes)
    n_rounds = len(seconds[HERE, works.SAVE])
    n_cores = len(os.sched_getaffinity(0))
    how = f"medians of {n_rounds} rounds" if n_rounds > 1 else "one round"
    print(f"\n  First calls of processes, {how} on {n_cores} cores;", end=" ")
    print("loads: the file is in the page cache.")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk to use")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ptsave-demo-", dir=options.dir) as folder:
        same = run(Path(folder).resolve(), options.rounds)
    sys.exit(0 if same else "\nSomething differs: this is a bug in ptsave.")


if __name__ == "__main__":
    main()
