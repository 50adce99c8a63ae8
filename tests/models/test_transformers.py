"""transformers reads what save_model writes, and the other way round.

Not with ``_leaves_nothing_open``: transformers reads with threads of its own, which stay a while.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _weights import assert_equal

import ptsave


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread that stays
    return pytest.importorskip("transformers")


def tiny_gpt2(transformers: Any) -> Any:
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=64,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_from_pretrained_reads_it(tmp_path: Path, transformers: Any, kind: Any, size: str) -> None:
    model = tiny_gpt2(transformers)
    model.config.save_pretrained(tmp_path)
    ptsave.save_model(model, tmp_path, max_shard_size=size, format=kind)
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, output_loading_info=True, use_safetensors=kind == "safetensors"
    )
    assert not any(report.values())
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_load_model_reads_what_save_pretrained_writes(
    tmp_path: Path, transformers: Any, size: str
) -> None:
    model, other = tiny_gpt2(transformers), tiny_gpt2(transformers)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert not any(ptsave.load_model(other, tmp_path))
    assert_equal(other.state_dict(), model.state_dict())
