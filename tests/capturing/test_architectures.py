"""Captures of published architectures with random weights: the same bits, and nothing left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_runs import assert_bit_identical, captured, tensors_in
from torch import Tensor, nn

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


def old_decoder() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config), {"input_ids": _TOKENS}


def mixture_of_experts() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MixtralConfig(**_SMALL, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config), {"input_ids": _TOKENS}


def encoder() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(**_SMALL)
    return transformers.BertForMaskedLM(config), {"input_ids": _TOKENS}


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


ARCHITECTURES = [decoder, old_decoder, mixture_of_experts, encoder, encoder_decoder, vision]


def logits_of(result: Any) -> Tensor:
    logits = result.logits
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize("make", ARCHITECTURES, ids=lambda make: make.__name__)
def test_training_computes_the_same_bits(make: Any, tmp_path: Path) -> None:
    model, inputs = make()
    run = assert_bit_identical(
        model, lambda m: logits_of(m(**inputs)).square().mean(), tmp_path / "run.pt"
    )
    with_gradients = {name.split("/", 2)[2] for name in run.names("backward")}
    assert any(name.startswith("#0/outputs") for name in with_gradients)


@pytest.mark.parametrize("make", ARCHITECTURES, ids=lambda make: make.__name__)
def test_every_call_and_value_is_there(make: Any, tmp_path: Path) -> None:
    """Against hooks that count calls and clone tensors."""
    model, inputs = make()
    model.eval()
    counts: Counter[str] = Counter()
    expected: dict[str, Tensor] = {}

    def count(name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        prefix = f"0/forward/{name}#{counts[name]}"
        counts[name] += 1
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for side, values in (("inputs", arguments), ("outputs", result)):
            for place, tensor in tensors_in(values):
                expected["/".join((prefix, side, *place))] = tensor.detach().clone()

    handles = [
        module.register_forward_hook(
            lambda _, args, kwargs, result, name=name: count(name, args, kwargs, result),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
    ]
    run = captured(model, lambda: model(**inputs), tmp_path / "run.pt", what=("inputs", "outputs"))
    for handle in handles:
        handle.remove()
    assert Counter(call.module for call in run.calls) == counts
    found = {name for name in run.names("forward") if run.values[name].kind == "tensor"}
    assert found == set(expected)
    for name, clone in expected.items():
        assert torch.equal(run.tensor(name), clone), name
