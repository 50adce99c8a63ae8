"""Captures of published architectures with random weights: the same bits, and nothing left out."""

from __future__ import annotations

import importlib
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


def speech() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.WhisperConfig(
        vocab_size=50,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=4,
        max_source_positions=8,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": torch.rand(2, 4, 16), "decoder_input_ids": _TOKENS}
    return transformers.WhisperForConditionalGeneration(config), inputs


def text_and_images() -> tuple[nn.Module, dict[str, Any]]:
    text = {**_SMALL, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 11}
    images = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    config = transformers.CLIPConfig(
        text_config=text,
        vision_config={**images, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    inputs = {"input_ids": _TOKENS, "pixel_values": torch.rand(2, 3, 8, 8)}
    return transformers.CLIPModel(config), inputs


def of_library(name: str) -> Any:
    """Return timm or torchvision, which are optional: pip has them for CUDA's torch only."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # operators that were built for another torch
        return pytest.skip(f"{name} cannot be imported: {error}")


def images() -> dict[str, Any]:
    return {"x": torch.rand(2, 3, 32, 32)}


def mobilenet() -> tuple[nn.Module, dict[str, Any]]:
    return of_library("torchvision").models.mobilenet_v3_small(weights=None), images()


def swin() -> tuple[nn.Module, dict[str, Any]]:
    make = of_library("torchvision").models.swin_transformer.SwinTransformer
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
    return make(**sizes, window_size=[2, 2], num_classes=5), images()


def convnext() -> tuple[nn.Module, dict[str, Any]]:
    make = of_library("timm").create_model
    return make("convnext_atto", dims=(8, 8, 16, 16), depths=(1, 1, 2, 1)), images()


def timm_vision() -> tuple[nn.Module, dict[str, Any]]:
    make = of_library("timm").create_model
    return make("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2), images()


ARCHITECTURES = [
    decoder,
    old_decoder,
    mixture_of_experts,
    encoder,
    encoder_decoder,
    vision,
    state_space,
    convolutions,
    speech,
    text_and_images,
    mobilenet,
    swin,
    convnext,
    timm_vision,
]


def logits_of(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    logits = result.logits_per_text if "logits_per_text" in result else result.logits
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

    def keep(name: str, side: str, values: Any) -> None:
        for place, tensor in tensors_in(values):
            key = "/".join((f"0/forward/{name}#{counts[name]}", side, *place))
            expected[key] = tensor.detach().clone()

    def before(name: str, args: Any, kwargs: dict[str, Any]) -> None:
        keep(name, "inputs", {**dict(enumerate(args)), **kwargs})

    def after(name: str, result: Any) -> None:
        keep(name, "outputs", result)
        counts[name] += 1

    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
            ),
            module.register_forward_hook(lambda _, args, result, name=name: after(name, result)),
        ]
    run = captured(model, lambda: model(**inputs), tmp_path / "run.pt", what=("inputs", "outputs"))
    for handle in handles:
        handle.remove()
    assert Counter(call.module for call in run.calls) == counts
    found = {name for name in run.names("forward") if run.values[name].kind == "tensor"}
    assert found == set(expected)
    for name, clone in expected.items():
        assert torch.equal(run.tensor(name), clone), name
