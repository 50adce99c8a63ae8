"""transformers' Trainer: complete checkpoints or none, written while the training goes on.

    pip install "ptsave[transformers]"
    python examples/huggingface_trainer.py

`checkpoint-<step>` is what a stock Trainer writes; `from_pretrained` reads it, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from ptsave.integrations.transformers import Trainer


def make_trainer(folder: Path, n_steps: int) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    rows = torch.randint(0, 64, (32, 8))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=n_steps,
        save_steps=2,
        save_total_limit=2,
        per_device_train_batch_size=4,
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    return Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        async_checkpoints=True,
        fsync_checkpoints=True,
    )


def main(folder: Path) -> None:
    make_trainer(folder, 4).train()
    print("saved:", *sorted(path.name for path in folder.iterdir()))

    trainer = make_trainer(folder, 6)
    trainer.train(resume_from_checkpoint=True)
    print("went on to step", trainer.state.global_step)

    model = GPT2LMHeadModel.from_pretrained(folder / "checkpoint-6")
    print("from_pretrained:", sum(each.numel() for each in model.parameters()), "parameters")


if __name__ == "__main__":
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--folder", type=Path, default=Path("trainer-checkpoints"))
    main(parser.parse_args().folder)
