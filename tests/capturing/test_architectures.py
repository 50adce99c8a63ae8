"""Captures of published architectures with random weights: the same bits, and nothing left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captured_runs import Observer, assert_bit_identical, captured
from torch import nn

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

_SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_TOKENS = torch.arange(12).reshape(2, 6)


def decoder() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(**_SMALL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), {"input_ids": _TOKENS}


def mixture_of_experts() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MixtralConfig(**_SMALL, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config), {"input_ids": _TOKENS}


def encoder_decoder() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": _TOKENS, "decoder_input_ids": _TOKENS}


def vision() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        **{key: value for key, value in _SMALL.items() if key != "vocab_size"},
        image_size=8,
        patch_size=4,
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.rand(2, 3, 8, 8)}


def state_space() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MambaConfig(
        vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2
    )
    return transformers.MambaForCausalLM(config), {"input_ids": _TOKENS}


def convolutions() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic"
    )
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": torch.rand(2, 3, 16, 16)}


@pytest.mark.parametrize(
    "make",
    [decoder, mixture_of_experts, encoder_decoder, vision, state_space, convolutions],
    ids=lambda make: make.__name__,
)
def test_same_bits_and_every_call_and_value(make: Any, tmp_path: Path) -> None:
    """Training computes the same; calls and values are those that plain hooks see."""
    model, inputs = make()
    run = assert_bit_identical(
        model, lambda m: m(**inputs).logits.square().mean(), tmp_path / "run.pt"
    )
    with_gradients = {name.split("/", 2)[2] for name in run.names("backward")}
    assert any(name.startswith("#0/outputs") for name in with_gradients)
    model.eval()
    observer = Observer(model)
    run = captured(model, lambda: model(**inputs), tmp_path / "run.pt", what=("inputs", "outputs"))
    observer.assert_same(run.calls, run.tensor)
