"""diffusers and peft, which write safetensors files, under ``install(safetensors=True)``."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_checkpoints import (
    assert_same_state,
    imported,
    killed_by_itself,
    names_written_by_the_engine,
    share_of_the_engine,
)
from torch import Tensor

import ptsave

pytestmark = pytest.mark.filterwarnings("ignore")

DIFFUSERS = """
import torch
import diffusers

def make():
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(32,), cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
    )

def save(model, folder):
    model.save_pretrained(folder)

def load(folder):
    return diffusers.UNet2DConditionModel.from_pretrained(folder)

def loss_of(model):
    return model(torch.randn(2, 1, 8, 8), 1, torch.randn(2, 3, 32)).sample.square().mean()

def parameters_of(model):
    return dict(model.named_parameters())
"""
DIFFUSERS_LORA = (
    DIFFUSERS
    + """
import peft
base = make

def make():
    model = base()
    model.add_adapter(peft.LoraConfig(r=64, target_modules=["to_q", "to_k", "to_v"]))
    return model

def save(model, folder):
    model.save_lora_adapter(folder)

def load(folder):
    model = base()
    model.load_lora_adapter(
        folder, weight_name="pytorch_lora_weights.safetensors", prefix=None, adapter_name="default"
    )
    return model

def parameters_of(model):
    return {name: each for name, each in model.named_parameters() if "lora" in name}
"""
)
PEFT = """
import torch
import peft
import transformers

def base():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=512, vocab_size=64, n_positions=16, resid_pdrop=0.2
    )
    return transformers.GPT2LMHeadModel(config)

def make():
    config = peft.LoraConfig(r=64, target_modules=["c_attn"], lora_dropout=0.1)
    return peft.get_peft_model(base(), config)

def save(model, folder):
    model.save_pretrained(folder)

def load(folder):
    return peft.PeftModel.from_pretrained(base(), folder, is_trainable=True)

def loss_of(model):
    rows = torch.randint(0, 64, (2, 8))
    return model(input_ids=rows, labels=rows).loss

def parameters_of(model):
    return {name: each for name, each in model.named_parameters() if "lora" in name}
"""
CLIENTS = {"diffusers": DIFFUSERS, "diffusers, LoRA": DIFFUSERS_LORA, "peft": PEFT}
FILES = {
    "diffusers": "diffusion_pytorch_model.safetensors",
    "diffusers, LoRA": "pytorch_lora_weights.safetensors",
    "peft": "adapter_model.safetensors",
}


class Client:
    """A library, and a tiny model of it that can be saved and loaded."""

    def __init__(self, name: str) -> None:
        for library in ("diffusers", "peft"):
            imported(library, "transformers", "accelerate")
        self.script = CLIENTS[name]
        self.file = FILES[name]
        self._names: dict[str, Any] = {}
        exec(self.script, self._names)

    def __getattr__(self, name: str) -> Any:
        return self._names[name]

    def state_of(self, model: Any) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self.parameters_of(model).items()}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    return Client(request.param)


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with ptsave.installed(safetensors=True):
        yield


def train(client: Client, model: Any, optimizer: Any, n_steps: int) -> None:
    model.train()
    for _ in range(n_steps):
        client.loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(client: Client, model: Any) -> Any:
    return torch.optim.AdamW(client.parameters_of(model).values(), lr=0.01)


def test_same_files_as_stock(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = client.make()
    written = names_written_by_the_engine(monkeypatch)
    client.save(model, tmp_path / "ours")
    assert share_of_the_engine(tmp_path / "ours", written) >= 0.99
    with ptsave.installed(safetensors=False):
        client.save(model, tmp_path / "stock")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert names == {path.name for path in (tmp_path / "stock").iterdir()}
    for name in names:
        ours, stock = (contents(tmp_path / each / name) for each in ("ours", "stock"))
        assert ours == stock, name


def contents(path: Path) -> Any:
    """Return the bytes of a file; the library writes several texts of metadata in any order."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end, data[end:]


def test_resumes_exactly(client: Client, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = client.make()
    optimizer = optimizer_of(client, model)
    train(client, model, optimizer, 2)
    client.save(model, tmp_path / "model")
    torch.save([optimizer.state_dict(), torch.get_rng_state()], tmp_path / "training.pt")
    train(client, model, optimizer, 2)
    expected = client.state_of(model)

    resumed = client.load(tmp_path / "model")
    optimizer = optimizer_of(client, resumed)
    state, random_state = torch.load(tmp_path / "training.pt")
    optimizer.load_state_dict(state)
    torch.set_rng_state(random_state)
    train(client, resumed, optimizer, 2)
    assert_same_state(client.state_of(resumed), expected)


def test_damaged_file(client: Client, tmp_path: Path) -> None:
    """The errors are the library's own, which name the file, or what is wrong with it."""
    client.save(client.make(), tmp_path / "model")
    path = tmp_path / "model" / client.file
    path.write_bytes(path.read_bytes()[:-100])
    errors = []
    for safetensors in (True, False):
        with ptsave.installed(safetensors=safetensors), pytest.raises(Exception) as caught:
            client.load(tmp_path / "model")
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    with pytest.raises(ptsave.CorruptCheckpointError, match=client.file.replace(".", r"\.")):
        ptsave.open(path)


def test_killed_save(client: Client, tmp_path: Path) -> None:
    killed_by_itself(
        client.script
        + """
import os, signal, sys, threading
import ptsave

ptsave.install(safetensors=True)
model = make()
for number in range(1000):
    with torch.no_grad():
        for each in parameters_of(model).values():
            each.fill_(number)
    save(model, sys.argv[1])
    if number == 2:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
""",
        tmp_path / "model",
    )
    whole = tmp_path / "whole"
    client.save(client.make(), whole)  # the libraries write their own small files in place
    shutil.copy(tmp_path / "model" / client.file, whole)
    values = {float(each.mean()) for each in client.state_of(client.load(whole)).values()}
    assert len(values) == 1
    assert min(values) >= 2
    safetensors = importlib.import_module("safetensors.torch")
    assert len(safetensors.load_file(tmp_path / "model" / client.file)) > 0
