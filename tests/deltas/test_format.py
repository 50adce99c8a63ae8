"""Versions are those of slime, miles and SGLang, in both directions."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import delta_reference as reference
import pytest
import torch
import zstandard
from delta_reference import assert_same_bits, bytes_of, changed, clone, random_bits
from torch import Tensor

import ptsave
from ptsave.contents import safetensors_fields
from ptsave.deltas import Publisher, apply, fold

DTYPES = {
    name: getattr(torch, name)
    for name in (*safetensors_fields.DTYPES.values(), "complex128")
    if hasattr(torch, name)
}
N_CHAINS = int(os.environ.get("PTSAVE_MUTATIONS", "100"))
FORMS = [(encoding, kind) for encoding in ("overwrite", "xor") for kind in reference.DIGESTS]


def weights_of_all_dtypes() -> dict[str, Tensor]:
    found = {
        f"{name}.{n}": random_bits(dtype, (n, 3))
        for name, dtype in DTYPES.items()
        for n in (0, 1, 700)
    }
    found["scalar"] = torch.tensor(1.5)
    found["large"] = random_bits(torch.bfloat16, (1_100_003,))
    found["same"] = random_bits(torch.float32, (100,))
    return found


def next_weights(weights: dict[str, Tensor], fraction: float) -> dict[str, Tensor]:
    return {
        name: tensor if name == "same" else changed(tensor, fraction)
        for name, tensor in weights.items()
    }


def contents(frame: bytes) -> bytes:
    data: bytes = zstandard.ZstdDecompressor().decompress(frame)  # needs the size in the header
    return data


@pytest.mark.parametrize(("encoding", "kind"), FORMS)
def test_versions_are_those_of_the_reference(encoding: Any, kind: Any, tmp_path: Path) -> None:
    weights = weights_of_all_dtypes()
    publisher = Publisher(
        tmp_path / "own", weights, encoding=encoding, checksum=kind, max_depth=None
    )
    held = {name: bytes_of(tensor).copy() for name, tensor in weights.items()}
    for number, fraction in enumerate((0.01, 0.3, 1), 1):
        new = next_weights(weights, fraction)
        folder = Path(publisher.publish(new, number))
        stock = reference.publish(tmp_path / "stock", number, weights, new, (encoding, kind))
        assert folder.name == stock.name
        assert {path.name for path in folder.iterdir()} == {path.name for path in stock.iterdir()}
        index, expected = (
            json.loads((each / reference.INDEX).read_text()) for each in (folder, stock)
        )
        assert index == expected
        (blobs, checksums), (stock_blobs, stock_checksums) = map(
            reference.contents_of, (folder, stock)
        )
        assert checksums == stock_checksums
        assert blobs.keys() == stock_blobs.keys()
        for name, blob in blobs.items():  # their blocks of zstd differ
            assert contents(blob) == contents(stock_blobs[name])
        if encoding == "overwrite":
            assert sum(map(len, blobs.values())) <= sum(map(len, stock_blobs.values()))
        reference.pull(tmp_path / "own", number, held)
        for name, tensor in new.items():
            assert held[name].tobytes() == bytes_of(tensor).tobytes()
        weights = new


@pytest.mark.parametrize(("encoding", "kind"), FORMS)
def test_versions_of_the_reference_are_applied(encoding: str, kind: str, tmp_path: Path) -> None:
    weights = weights_of_all_dtypes()
    held = {name: clone(tensor) for name, tensor in weights.items()}
    for number, fraction in enumerate((0.01, 0.3, 1), 1):
        new = next_weights(weights, fraction)
        reference.publish(tmp_path, number, weights, new, (encoding, kind))
        assert apply(tmp_path, held) == number
        assert_same_bits(held, new)
        weights = new


def test_a_version_without_changes(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3)}
    publisher = Publisher(tmp_path / "own", weights)
    folder = Path(publisher.publish(weights))
    stock = reference.publish(tmp_path / "stock", 1, weights, weights)
    assert [path.name for path in folder.iterdir()] == [reference.INDEX]
    index, expected = (json.loads((each / reference.INDEX).read_text()) for each in (folder, stock))
    assert index == expected
    assert apply(tmp_path / "own", weights) == 1


def test_nan_payloads_and_signs_of_zeros_are_changes(tmp_path: Path) -> None:
    old = torch.tensor([0x7FC00000, 0, 0x7F800001], dtype=torch.int32).view(torch.float32)
    new = torch.tensor([0x7FC00001, -(1 << 31), 0x7FA00001], dtype=torch.int32).view(torch.float32)
    Publisher(tmp_path, {"a": old}).publish({"a": new})
    held = {"a": old.clone()}
    apply(tmp_path, held)
    assert_same_bits(held, {"a": new})


def may_be_confused(states: list[dict[str, Tensor]]) -> bool:
    """Return whether later weights differ from the first ones, but have the same Adler-32."""
    first, *later = ({k: bytes_of(v).tobytes() for k, v in each.items()} for each in states)
    return any(
        data != first[name] and zlib.adler32(data) == zlib.adler32(first[name])
        for weights in later
        for name, data in weights.items()
    )


def test_random_chains(tmp_path: Path) -> None:
    """Targets at any version reach any later one; each version may have another form."""
    print(seed := random.SystemRandom().randrange(1 << 32) if N_CHAINS > 100 else 1)
    generator = random.Random(seed)
    torch.manual_seed(seed)
    names = list(DTYPES)
    for _ in range(N_CHAINS):
        root = tmp_path / "root"
        states = [
            {
                f"t{i}": random_bits(DTYPES[generator.choice(names)], (generator.randrange(200),))
                for i in range(3)
            }
        ]
        is_of_one_form = generator.random() < 0.5
        form = generator.choice(FORMS)
        for number in range(1, generator.randrange(2, 9)):
            states.append(
                {
                    name: changed(tensor, generator.choice([0, 0, 0.02, 0.5]))
                    for name, tensor in states[-1].items()
                }
            )
            form = form if is_of_one_form else generator.choice(FORMS)
            reference.publish(root, number, states[-2], states[-1], form)
        is_folded = is_of_one_form and generator.random() < 0.5
        last = len(states) - 1
        begin = generator.randrange(len(states))
        end = generator.randrange(max(begin, 1), len(states))
        if is_folded:
            fold(root)
            begin, end = (begin if form[0] == "overwrite" else 0), last
        # No version has a checksum of the first weights, which a tensor may also have later, and
        # another version may have their Adler-32.
        unknown = begin if may_be_confused(states) else None
        for base in (unknown, begin):
            held = {name: clone(tensor) for name, tensor in states[begin].items()}
            assert apply(root, held, end, base_version=base) == end
            assert_same_bits(held, states[end])
        if all(each.dtype != torch.complex128 for each in states[0].values()):
            file = tmp_path / "model.safetensors"
            ptsave.save_model(states[begin], file)
            assert apply(root, file, end, base_version=unknown) == end
            assert_same_bits(ptsave.load(file), states[end])
        shutil.rmtree(root)
        shutil.rmtree(tmp_path / ".weight_sync", ignore_errors=True)
