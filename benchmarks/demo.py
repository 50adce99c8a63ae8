"""`make demo`: the checkpoint of a real training step, through stock torch and through ptsave.

Trains one AdamW step of a model with GPT-2 small's shapes, saves and loads the checkpoint with
both libraries, compares the files byte for byte and the loaded tensors with the trained ones, and
prints what it took.  The exit status is non-zero if anything differs.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ptsave.bench.system import fetch_free_memory

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 50257
CONTEXT = 1024
WIDTH = 768
HEADS = 12
LAYERS = 12
BATCH = (2, 64)
ROUNDS = 3
MAX_SECONDS = 90  # no further round starts after so long

Seconds = dict[tuple[str, str], list[float]]  # by library and operation


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


def sync_path(path: Path) -> None:
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Stock:
    """torch.save and torch.load."""

    name = "torch"

    def save(self, checkpoint: object, path: Path, *, fsync: bool) -> None:
        torch.save(checkpoint, path)
        if fsync:
            sync_path(path)

    def load(self, path: Path) -> object:
        return torch.load(path)


class Ptsave:
    """ptsave.save and ptsave.load."""

    name = "ptsave"

    def __init__(self) -> None:
        try:
            import ptsave
        except ImportError as error:
            sys.exit(f"{error}: `make demo` builds and installs ptsave first")
        self._save = ptsave.save
        self._load = ptsave.load

    def save(self, checkpoint: object, path: Path, *, fsync: bool) -> None:
        self._save(checkpoint, path, fsync=fsync)

    def load(self, path: Path) -> object:
        return self._load(path)


Library = Stock | Ptsave
LIBRARIES: dict[str, type[Library]] = {"torch": Stock, "ptsave": Ptsave}


def seconds_of(action: Callable[[], object], nbytes: int) -> float:
    os.sync()  # what others wrote must not slow this one down
    fetch_free_memory(nbytes + nbytes // 8)  # a file in the page cache, or tensors
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    del result  # freed after the clock has stopped
    return seconds


def seconds_of_load_in_fresh_process(library: Library, path: Path) -> float:
    """Time a load as a resumed training does it: this process has memory to reuse, that one not."""
    command = [sys.executable, "-m", "benchmarks.demo", "--time-load", library.name, str(path)]
    result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(result.stdout)


def seconds_of_load(name: str, path: Path) -> float:
    """Time one load of a file in the page cache; a direct save leaves none of it there."""
    library = LIBRARIES[name]()
    with path.open("rb", buffering=0) as file:
        while file.read(8 << 20):
            pass
    return seconds_of(partial(library.load, path), path.stat().st_size)


def time_round(library: Library, checkpoint: object, path: Path, seconds: Seconds) -> None:
    """Do everything once with one library; its file stays behind."""
    nbytes = nbytes_of(checkpoint)
    for operation, fsync in (("save", False), ("save + fsync", True)):
        path.unlink(missing_ok=True)
        elapsed = seconds_of(partial(library.save, checkpoint, path, fsync=fsync), nbytes)
        seconds.setdefault((library.name, operation), []).append(elapsed)
    elapsed = seconds_of_load_in_fresh_process(library, path)
    seconds.setdefault((library.name, "load"), []).append(elapsed)


def print_table(seconds: Seconds, nbytes: int) -> None:
    print(f"\n  {'':14}{'torch':>18}{'ptsave':>20}{'ratio':>9}")
    for operation in ("save", "save + fsync", "load"):
        stock = median(seconds["torch", operation])
        ours = median(seconds["ptsave", operation])
        cells = (f"{s:6.2f} s {nbytes / s / 1e9:5.2f} GB/s" for s in (stock, ours))
        print(f"  {operation:14}{'  '.join(cells)}  {stock / ours:6.1f}x")


# ------------------------------------------------------------------------------------------- main


def check(claim: str, holds: bool) -> bool:
    print(f"  {'yes' if holds else 'NO '}  {claim}")
    return holds


def check_all(libraries: list[Library], checkpoint: object, paths: dict[str, Path]) -> bool:
    """Print what is the same, and return whether everything is."""
    verdicts = [
        check(
            "the two files are identical, byte for byte",
            filecmp.cmp(paths["torch"], paths["ptsave"], shallow=False),
        )
    ]
    for library in libraries:
        other = next(path for name, path in paths.items() if name != library.name)
        verdicts.append(
            check(
                f"{library.name}.load of the other's file gives back what was trained",
                equal(library.load(other), checkpoint),
            )
        )
    return all(verdicts)


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ptsave-demo-", dir=parent) as directory:
        yield Path(directory).resolve()


def run(directory: Path, rounds: int) -> bool:
    libraries = [make_library() for make_library in LIBRARIES.values()]
    print("Training one step of a GPT-2-small-shaped model with AdamW ...", flush=True)
    checkpoint = train_one_step()
    nbytes = nbytes_of(checkpoint)
    print(f"Its checkpoint (model, optimizer, random state): {nbytes / 1e9:.2f} GB of tensors.")

    # One file name in two folders: torch puts the file's name into the file.
    paths = {library.name: directory / library.name / "checkpoint.pt" for library in libraries}
    seconds: Seconds = {}
    start = time.perf_counter()
    for number in range(1, rounds + 1):
        if number > 1 and time.perf_counter() - start > MAX_SECONDS:
            break
        print(f"Saving and loading with both, round {number} of {rounds} ...", flush=True)
        for library in libraries:
            paths[library.name].parent.mkdir(exist_ok=True)
            time_round(library, checkpoint, paths[library.name], seconds)

    print("\nIs everything the same?")
    same = check_all(libraries, checkpoint, paths)
    print_table(seconds, nbytes)
    n_rounds = len(seconds["ptsave", "load"])
    n_cores = len(os.sched_getaffinity(0))
    print(f"\n  Medians of {n_rounds} rounds on {n_cores} cores.", end=" ")
    print("Loads: fresh process, file in the page cache.")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk to use")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--time-load", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time_load is not None:
        name, path = options.time_load[0], Path(options.time_load[1])
        print(seconds_of_load(name, path))
        return
    with scratch_directory(options.dir) as directory:
        same = run(directory, options.rounds)
    sys.exit(0 if same else "\nSomething differs: this is a bug in ptsave.")


if __name__ == "__main__":
    main()
