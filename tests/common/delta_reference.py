"""The patches of slime, miles and SGLang, in numpy, zstandard and the safetensors library."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

INDEX = "model.safetensors.index.json"
SHARD = "model-00000-of-00001.safetensors"
DIGESTS: dict[str, Any] = {
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
}


def bytes_of(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor's elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def encoded(old: Bytes, new: Bytes, encoding: str) -> bytes:
    """Return a patch before it is compressed."""
    if encoding == "xor":
        return (old ^ new).tobytes()
    mask = new != old
    count = np.array([np.count_nonzero(mask)], "<u4")
    positions: npt.NDArray[np.uint32] = np.flatnonzero(mask).astype("<u4")
    return np.concatenate([count.view(np.uint8), positions.view(np.uint8), new[mask]]).tobytes()


def patched(old: Bytes, patch: bytes, encoding: str) -> Bytes:
    """Return new bytes."""
    if encoding == "xor":
        return old ^ np.frombuffer(patch, np.uint8)
    count = int.from_bytes(patch[:4], "little")
    new = old.copy()
    new[np.frombuffer(patch, "<u4", count, 4)] = np.frombuffer(
        patch, np.uint8, count, 4 + 4 * count
    )
    return new


def write_version(
    root: Path,
    number: int,
    blobs: Mapping[str, bytes],
    checksums: Mapping[str, str],
    *,
    encoding: str = "overwrite",
    checksum: str = "xxh3-128",
    **metadata: str,
) -> Path:
    """Write compressed patches and an index, and return the directory."""
    folder = root / f"weight_v{number:06d}"
    folder.mkdir(parents=True)
    tensors = {name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()}
    if tensors:
        save_file(tensors, folder / SHARD, metadata=dict(checksums))
    index = {
        "metadata": {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": checksum,
            **metadata,
        },
        "weight_map": dict.fromkeys(sorted(tensors), SHARD),
    }
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def publish(
    root: Path,
    number: int,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    form: tuple[str, str] = ("overwrite", "xxh3-128"),
) -> Path:
    """Write a version as slime does, and return its directory."""
    encoding, checksum = form
    blobs, checksums = {}, {}
    for name, tensor in new.items():
        before, after = bytes_of(old[name]), bytes_of(tensor)
        if not np.array_equal(before, after):
            patch = encoded(before, after, encoding)
            blobs[name] = zstandard.ZstdCompressor(level=1).compress(patch)
            checksums[name] = DIGESTS[checksum](after.tobytes())
    return write_version(root, number, blobs, checksums, encoding=encoding, checksum=checksum)


def contents_of(folder: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the compressed patches and the checksums of a version."""
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, framework="np") as shard:
        blobs = {name: shard.get_tensor(name).tobytes() for name in shard.keys()}  # noqa: SIM118
        return blobs, shard.metadata()


def pull(root: Path, number: int, weights: dict[str, Bytes]) -> None:
    """Apply a version to the bytes of tensors as SGLang does."""
    folder = root / f"weight_v{number:06d}"
    index = json.loads((folder / INDEX).read_text()) if (folder / INDEX).exists() else {}
    metadata = index.get("metadata", {})
    if "delta_encoding" not in metadata:
        files = [folder / name for name in {*index["weight_map"].values()}] if index else None
        for path in files or [folder / "model.safetensors"]:
            weights.update({name: bytes_of(each) for name, each in load_file(path).items()})
        return
    assert metadata["version"] == f"{number:06d}"
    assert metadata["base_version"] == f"{number - 1:06d}"
    if not index["weight_map"]:
        return
    blobs, checksums = contents_of(folder)
    assert blobs.keys() == index["weight_map"].keys()
    for name, blob in blobs.items():
        if metadata["delta_encoding"] == "xor":
            patch = zstandard.ZstdDecompressor().stream_reader(blob).read()
        else:  # needs the size in the frame's header
            patch = zstandard.ZstdDecompressor().decompress(blob)
        weights[name] = patched(weights[name], patch, metadata["delta_encoding"])
        digest = DIGESTS[metadata["checksum_format"]](weights[name].tobytes())
        assert digest == checksums[name]


# ---------------------------------------------------------------------------------------- weights


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of random bits, which for floats include NaNs with payloads and -0.0."""
    n = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (n,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def clone(tensor: Tensor) -> Tensor:
    """Return a copy of a contiguous tensor, also if torch cannot copy its dtype (float4 in 2.9)."""
    memory = tensor.detach().view(-1).view(torch.uint8).clone()
    return memory.view(tensor.dtype).view(tensor.shape)


def changed(tensor: Tensor, fraction: float) -> Tensor:
    """Return a copy of which about this fraction of bytes is different."""
    copy = clone(tensor)
    memory = copy.view(-1).view(torch.uint8)
    where = torch.rand(memory.shape) < fraction
    flips = torch.randint(1, 256, memory.shape, dtype=torch.uint8)
    memory[where] ^= 1 if tensor.dtype == torch.bool else flips[where]
    return copy


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert actual[name].shape == tensor.shape
        assert bytes_of(actual[name]).tobytes() == bytes_of(tensor).tobytes(), name
