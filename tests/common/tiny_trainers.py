"""transformers' Trainer of a tiny model, for tests of its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from client_checkpoints import assert_same_state, imported
from stock_comparison import assert_same_object

N_STEPS = 6


def imported_transformers() -> Any:
    """Import transformers, and let it be silent; skips the test if it is not installed."""
    library = imported("transformers", "accelerate")
    library.utils.logging.set_verbosity_error()
    # tqdm's lock is one of all forked processes, and stays locked by a child that is killed.
    library.utils.logging.disable_progress_bar()
    # Which takes seconds, and which children would do again: the library's own names are lazy.
    _ = library.Trainer, library.TrainingArguments, library.GPT2LMHeadModel
    return library


def make_trainer(library: Any, kind: str, folder: Path, **options: Any) -> Any:
    """Make a Trainer: ``stock``, or ours that saves ``blocking`` or in the ``background``."""
    from ptsave.integrations.transformers import Trainer

    arguments = {
        "output_dir": str(folder),
        "max_steps": N_STEPS,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_total_limit": 2,
        "logging_strategy": "no",
        **options,
    }
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (24, 8), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = library.TrainingArguments(**arguments)
    classes = {
        "stock": library.Trainer,
        "blocking": Trainer,
        "background": lambda *a, **k: Trainer(*a, async_checkpoints=True, **k),
    }
    return classes[kind](_model(library), arguments, train_dataset=data, eval_dataset=data[:4])


def _model(library: Any) -> Any:
    torch.manual_seed(0)
    config = library.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, resid_pdrop=0.2
    )
    return library.GPT2LMHeadModel(config)


def state_of(trained: Any) -> dict[str, Any]:
    """Return all that a resumed Trainer must have as one that was not interrupted."""
    return {
        "model": trained.model.state_dict(),
        "optimizer": trained.optimizer.state_dict()["state"],
        "scheduler": trained.lr_scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    """Compare all files of two checkpoints' directories that hold a state of the training."""
    assert sorted(os.listdir(found)) == sorted(os.listdir(expected))
    name = "model.safetensors"
    assert (found / name).read_bytes() == (expected / name).read_bytes()
    for name in ("optimizer.pt", "scheduler.pt"):
        assert_same_state(torch.load(found / name), torch.load(expected / name), name)
    for path in found.glob("rng_state*.pth"):
        assert_same_object(
            *(torch.load(each, weights_only=False) for each in (path, expected / path.name))
        )
