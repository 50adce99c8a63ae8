"""Reinforcement learning: a trainer publishes new weights, and a server takes them over.

    pip install "ptsave[deltas]"
    python examples/weight_sync.py

Both roles run as processes of their own, and each may be killed at any moment and started again. A
version holds only the bytes that have changed. After each version, the server's logits are equal to
the trainer's, bit for bit. On several machines, give both roles a shared directory or a URL:

    python examples/weight_sync.py trainer --versions s3://bucket/run
    python examples/weight_sync.py server --versions s3://bucket/run
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import ptsave
from ptsave.deltas import Publisher, Weights, apply

VOCABULARY, WIDTH, LENGTH = 256, 64, 32


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.tokens(tokens)))
        return logits


def served_model() -> Transformer:
    return Transformer().bfloat16().eval()


def logits_of(model: Transformer) -> Tensor:
    """Return the answer to a fixed prompt."""
    with torch.no_grad():
        logits: Tensor = model(torch.arange(LENGTH)[None] % VOCABULARY)
    return logits


def state_to_serve(model: Transformer) -> dict[str, Tensor]:
    """Return the weights in the dtype of servers, which are rounded from those being trained."""
    return {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}


def trainer(args: argparse.Namespace) -> None:
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-6)
    checkpoint = args.folder / "trainer.pt"
    if checkpoint.exists():
        ptsave.load_checkpoint(checkpoint, model=model, optimizer=optimizer)
    base = args.folder / "base.safetensors"
    if not base.exists():
        ptsave.save_model(state_to_serve(model), base)

    # After a restart, the base is the newest version, even if the checkpoint is older.
    try:
        newest = Weights(args.versions, base, storage_options=args.storage_options)
        publisher = Publisher(args.versions, newest, storage_options=args.storage_options)
    except FileNotFoundError:  # there is no version yet
        publisher = Publisher(args.versions, base, storage_options=args.storage_options)

    answering = served_model()
    while publisher.version < args.count:
        prompt = torch.randint(VOCABULARY, (8, LENGTH))
        loss = nn.functional.cross_entropy(model(prompt).flatten(0, 1), prompt.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        state = state_to_serve(model)
        answering.load_state_dict(state)
        ptsave.save(logits_of(answering), args.folder / f"expected-{publisher.version + 1}.pt")
        publisher.publish(state)
        ptsave.save_checkpoint(checkpoint, model=model, optimizer=optimizer)


def server(args: argparse.Namespace) -> None:
    base = args.folder / "base.safetensors"
    while not base.exists():
        time.sleep(0.05)
    answered = [int(path.stem.split("-")[1]) for path in args.folder.glob("answer-*.pt")]
    version = max(answered, default=0)
    model = served_model()
    if args.copy is not None:  # a file of this machine, which changes in place
        args.copy.parent.mkdir(parents=True, exist_ok=True)
        if not args.copy.exists():
            ptsave.save_model(dict(ptsave.iter_weights(base)), args.copy)
    elif version > 0:  # no file changes: the base is patched while it is read
        weights = Weights(args.versions, base, version, storage_options=args.storage_options)
        ptsave.load_model(model, weights)
    else:
        ptsave.load_model(model, base)

    while version < args.count:
        try:
            if args.copy is not None:
                options = args.storage_options
                version = apply(args.versions, args.copy, version + 1, storage_options=options)
                ptsave.load_model(model, args.copy)
            else:
                version = apply(
                    args.versions,
                    model,
                    version + 1,
                    base_version=version,
                    storage_options=args.storage_options,
                )
        except FileNotFoundError:  # the next version is not there yet
            time.sleep(0.05)
            continue
        ptsave.save(logits_of(model), args.folder / f"answer-{version}.pt")


def both(arguments: list[str], args: argparse.Namespace) -> None:
    """Run each role in a process of its own, and compare their logits."""
    command = [sys.executable, __file__]
    roles = [subprocess.Popen([*command, role, *arguments]) for role in ("trainer", "server")]
    codes = [role.wait() for role in roles]
    assert codes == [0, 0]
    for version in range(1, args.count + 1):
        expected = ptsave.load(args.folder / f"expected-{version}.pt")
        assert torch.equal(ptsave.load(args.folder / f"answer-{version}.pt"), expected)
    print(f"{args.count} versions: the server's logits are equal to the trainer's")


def main(arguments: list[str]) -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("role", choices=["trainer", "server"], nargs="?", help="by default, both")
    parser.add_argument("--folder", type=Path, default=Path("weight-sync"))
    parser.add_argument("--versions", help="directory or URL of the versions")
    parser.add_argument("--storage-options", type=json.loads, help="for a URL, as JSON")
    parser.add_argument("--count", type=int, default=5, help="how many versions to publish")
    parser.add_argument("--copy", type=Path, help="path of a copy of the weights (server)")
    args = parser.parse_args(arguments)
    args.versions = args.versions or str(args.folder / "versions")
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # so that both roles add numbers in the same order
    if args.role is None:
        both(arguments, args)
    else:
        {"trainer": trainer, "server": server}[args.role](args)


if __name__ == "__main__":
    main(sys.argv[1:])
