"""Two directories: nothing that is in one of them is left out of a comparison, or it is named."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import json_of, run
from safetensors.torch import save_file
from torch import Tensor

import ptsave
from ptsave.cli.commands import FAILED
from ptsave.comparison.compare import Comparison, compare


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.rand(30, 30, generator=generator) for i in range(3)}


def make_trainer(folder: Path) -> Path:
    """Write what transformers.Trainer does."""
    folder.mkdir(parents=True)
    save_file(weights(), folder / "model.safetensors")
    torch.save(
        {"state": {0: {"exp_avg": torch.ones(5)}}, "param_groups": []}, folder / "optimizer.pt"
    )
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    torch.save(argparse.Namespace(lr=0.1), folder / "training_args.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return folder


def pair_of(make: Callable[[Path], Path], tmp_path: Path) -> tuple[Path, Path]:
    return make(tmp_path / "a"), make(tmp_path / "b")


def kinds(found: Comparison) -> list[tuple[str, str]]:
    return [(each.kind, each.name) for each in found.differences]


def test_equal_directories(tmp_path: Path) -> None:
    a, b = pair_of(make_trainer, tmp_path)
    found = compare(a, b)
    assert found.equal
    assert found.n_tensors == 4
    assert run("diff", a, b).exit_code == 0


def optimizer(folder: Path) -> None:
    torch.save(
        {"state": {0: {"exp_avg": torch.zeros(5)}}, "param_groups": []}, folder / "optimizer.pt"
    )


def text(folder: Path) -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4}))


def model(folder: Path) -> None:
    save_file(weights(1) | {"layer.0": weights()["layer.0"]}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (optimizer, [("numbers", "optimizer.pt/state.0.exp_avg")]),
        (
            lambda folder: torch.save({"last_epoch": 4}, folder / "scheduler.pt"),
            [("value", "scheduler.pt/last_epoch")],
        ),
        (text, [("value", "trainer_state.json")]),
        (lambda folder: (folder / "optimizer.pt").unlink(), [("only in a", "optimizer.pt")]),
        (model, [("numbers", "layer.1"), ("numbers", "layer.2")]),
    ],
)
def test_every_file_counts(
    tmp_path: Path, change: Callable[[Path], None], expected: list[tuple[str, str]]
) -> None:
    a, b = pair_of(make_trainer, tmp_path)
    change(b)
    found = compare(a, b)
    assert kinds(found) == expected
    shown = run("diff", a, b)
    assert shown.exit_code == 1
    assert all(name in shown.stdout for _, name in expected)
    assert "different: " in shown.stdout
    assert [(kind.replace("in a", "in b"), name) for kind, name in expected] == kinds(compare(b, a))


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    a, b = pair_of(make_trainer, tmp_path)
    arguments = argparse.Namespace(lr=0.2)
    torch.save(arguments, b / "training_args.bin")
    assert [each.name for each in compare(a, b).differences] == ["training_args.bin"]
    torch.save(arguments, b / "training_args.bin", _use_new_zipfile_serialization=False)
    found = compare(a, b)
    assert not found.equal
    assert not found.differences
    assert list(found.not_compared) == ["training_args.bin"]
    result = run("diff", a, b)
    assert result.exit_code == FAILED
    assert "! training_args.bin  not compared: " in result.stdout
    shown = json_of("diff", a, b, code=FAILED)
    assert not shown["equal"]
    assert list(shown["not_compared"]) == ["training_args.bin"]
    (b / "rng_state.pth").write_bytes(b"something")  # damaged, by its name
    assert any("rng_state.pth" in name for name in compare(a, b).not_compared)


def test_directories_below(tmp_path: Path) -> None:
    def make(folder: Path) -> Path:
        for step in (10, 20):
            make_trainer(folder / f"checkpoint-{step}")
        return folder

    a, b = pair_of(make, tmp_path)
    assert compare(a, b).equal
    optimizer(b / "checkpoint-20")
    model(b / "checkpoint-10")
    (a / "logs").mkdir()
    assert sorted(kinds(compare(a, b))) == [
        ("numbers", "checkpoint-10/layer.1"),
        ("numbers", "checkpoint-10/layer.2"),
        ("numbers", "checkpoint-20/optimizer.pt/state.0.exp_avg"),
        ("only in a", "logs"),
    ]


def test_steps_of_a_checkpointer(tmp_path: Path) -> None:
    def make(folder: Path) -> Path:
        with ptsave.AsyncCheckpointer(folder) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, model=weights(step))
        return folder

    a, b = pair_of(make, tmp_path)
    assert compare(a, b).equal
    changed = {"model": {**weights(2), "layer.1": torch.zeros(30, 30)}}
    ptsave.save(changed, b / "step-00000002.pt")
    (b / "step-00000001.pt").unlink()
    assert kinds(compare(a, b)) == [
        ("numbers", "step-00000002.pt/model.layer.1"),
        ("only in a", "step-00000001.pt"),
    ]


def test_a_model_in_other_shards(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    ptsave.save_model(weights(), a, max_shard_size="4KB")
    ptsave.save_model(weights(), b)
    assert compare(a, b).equal
    ptsave.save_model(weights(), b, format="pt")
    assert kinds(compare(a, b)) == [("only in b", "pytorch_model.bin")]


def test_only_some_names(tmp_path: Path) -> None:
    a, b = pair_of(make_trainer, tmp_path)
    optimizer(b)
    text(b)
    assert compare(a, b, patterns=["layer.*"]).equal
    assert kinds(compare(a, b, patterns=["state.*"])) == [
        ("numbers", "optimizer.pt/state.0.exp_avg")
    ]
    with pytest.raises(KeyError, match="lawyer"):
        compare(a, b, patterns=["lawyer.*"])


def test_a_directory_and_a_file(tmp_path: Path) -> None:
    a, b = pair_of(make_trainer, tmp_path)
    found = compare(a, b / "model.safetensors")
    assert not found.differences
    assert sorted(found.not_compared) == ["optimizer.pt", "scheduler.pt", "training_args.bin"]
    only = tmp_path / "only"
    ptsave.save_model(weights(), only)
    assert compare(only, b / "model.safetensors").equal


def test_ls_names_what_it_does_not_list(tmp_path: Path) -> None:
    folder = make_trainer(tmp_path / "a")
    others = "optimizer.pt, scheduler.pt, training_args.bin"
    assert f"not listed: 3 other checkpoints here ({others})" in run("ls", folder).stderr
    only = tmp_path / "only"
    ptsave.save_model(weights(), only, max_shard_size="4KB")
    assert not run("ls", only).stderr
