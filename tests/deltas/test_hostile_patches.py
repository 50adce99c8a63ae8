"""Patches and indices of an attacker: a named error, and the target is unchanged."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import delta_reference as reference
import pytest
import torch
import zstandard
from delta_reference import assert_same_bits, bytes_of, changed, random_bits
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

import ptsave
from ptsave.deltas import Publisher, apply

N_MUTATIONS = int(os.environ.get("PTSAVE_MUTATIONS", "300"))
OLD = {"a": torch.zeros(1000, dtype=torch.uint8)}
NEW = {"a": torch.ones(1000, dtype=torch.uint8)}
DIGEST = reference.DIGESTS["xxh3-128"](bytes_of(NEW["a"]).tobytes())


def compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def of_unknown_size(data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    return bytes(stream.compress(data) + stream.flush())


def patch(count: int, positions: list[int], values: bytes) -> bytes:
    return struct.pack(f"<I{len(positions)}I", count, *positions) + values


def assert_refused(root: Path, match: str, *, target: dict[str, Tensor] | None = None) -> None:
    held = {name: tensor.clone() for name, tensor in (target or OLD).items()}
    before = {name: tensor.clone() for name, tensor in held.items()}
    for base in (None, 0):
        with pytest.raises(ptsave.CorruptCheckpointError, match=match):
            apply(root, held, base_version=base)
        assert_same_bits(held, before)


PATCHES = {
    "outside": (patch(1, [1000], b"x"), "a position is outside"),
    "far outside": (patch(2, [0, 0xFFFFFFFF], b"xx"), "a position is outside"),
    "descending": (patch(2, [5, 4], b"xx"), "the positions do not ascend"),
    "twice": (patch(2, [5, 5], b"xx"), "the positions do not ascend"),
    "count too large": (patch(0xFFFFFFFF, [1], b"x"), "does not fit the patch's size"),
    "count times five overflows": (patch(0x33333334, [1], b"x"), "does not fit the patch's size"),
    "count too small": (patch(1, [1, 2], b"xx"), "does not fit the patch's size"),
    "no values": (patch(1, [1], b""), "does not fit the patch's size"),
    "nothing": (b"", "does not fit the patch's size"),
    "no count": (b"\x01\0\0", "does not fit the patch's size"),
    "larger than the tensor justifies": (bytes(5005), "it expands to 5005 bytes"),
}


@pytest.mark.parametrize(("data", "match"), PATCHES.values(), ids=PATCHES)
def test_patches(data: bytes, match: str, tmp_path: Path) -> None:
    reference.write_version(tmp_path, 1, {"a": compressed(data)}, {"a": DIGEST})
    assert_refused(tmp_path, f"the patch of tensor a cannot be used: .*{match}")


def test_a_frame_without_a_size(tmp_path: Path) -> None:
    data = patch(1000, list(range(1000)), b"\1" * 1000)
    reference.write_version(tmp_path / "good", 1, {"a": of_unknown_size(data)}, {"a": DIGEST})
    held = {"a": OLD["a"].clone()}
    assert apply(tmp_path / "good", held) == 1
    assert_same_bits(held, NEW)
    bomb = of_unknown_size(bytes(5005))
    reference.write_version(tmp_path / "bomb", 1, {"a": bomb}, {"a": DIGEST})
    assert_refused(tmp_path / "bomb", "decompression error")


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_frames(encoding: str, tmp_path: Path) -> None:
    good = compressed(reference.encoded(bytes_of(OLD["a"]), bytes_of(NEW["a"]), encoding))
    frames = {"cut": good[:-1], "empty": b"\0", "garbage": b"not a frame of zstd"}
    if encoding == "overwrite":
        frames["trailing"] = good + good
    for name, frame in frames.items():
        root = tmp_path / name
        reference.write_version(root, 1, {"a": frame}, {"a": DIGEST}, encoding=encoding)
        assert_refused(root, "the patch of tensor a cannot be used")


@pytest.mark.parametrize("size", [0, 999, 1001])
def test_xor_patches_of_another_size(size: int, tmp_path: Path) -> None:
    frame = compressed(b"\1" * size)
    reference.write_version(tmp_path, 1, {"a": frame}, {"a": DIGEST}, encoding="xor")
    assert_refused(tmp_path, r"it has .* the tensor's 1000 bytes")


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_a_bomb_takes_no_memory(encoding: str, tmp_path: Path) -> None:
    """A frame of 130 KB that would expand to 4 GiB."""
    stream = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 32)
    frame = b"".join([*(stream.compress(bytes(1 << 24)) for _ in range(1 << 8)), stream.flush()])
    reference.write_version(tmp_path, 1, {"a": frame}, {"a": DIGEST}, encoding=encoding)
    tracemalloc.start()
    try:
        assert_refused(tmp_path, "it expands to|it has more than")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def index_of(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = root / "weight_v000001" / reference.INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


INDICES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another version": (
        lambda index: index["metadata"].update(version="000002"), "this is version 2, based on"
    ),
    "based on itself": (
        lambda index: index["metadata"].update(base_version="000001"), "based on version 1"
    ),
    "based on a later one": (
        lambda index: index["metadata"].update(base_version="000007"), "based on version 7"
    ),
    "no digits": (lambda index: index["metadata"].update(version="-1"), "version must be digits"),
    "many digits": (
        lambda index: index["metadata"].update(base_version="9" * 5000), "must be digits"
    ),
    "a number": (lambda index: index["metadata"].update(version=1), "version must be digits"),
    "no version": (lambda index: index["metadata"].pop("base_version"), "must be digits"),
    "a file outside": (
        lambda index: index["weight_map"].update(a="../x.safetensors"), "must be in this directory"
    ),
    "no weight_map": (lambda index: index.pop("weight_map"), "has no weight_map"),
    "a tensor too many": (
        lambda index: index["weight_map"].update(b=reference.SHARD), "not those that"
    ),
    "a tensor too few": (
        lambda index: index.update(weight_map={"b": reference.SHARD}), "not those that"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "match"), INDICES.values(), ids=INDICES)
def test_indices(change: Callable[[dict[str, Any]], object], match: str, tmp_path: Path) -> None:
    reference.publish(tmp_path, 1, OLD, NEW)
    index_of(tmp_path, change)
    assert_refused(tmp_path, match)


@pytest.mark.parametrize("key", ["delta_encoding", "compression_format", "checksum_format"])
@pytest.mark.parametrize("value", ["other", 3, None, ["xor"]])
def test_unknown_forms(key: str, value: Any, tmp_path: Path) -> None:
    reference.publish(tmp_path, 1, OLD, NEW)
    index_of(tmp_path, lambda index: index["metadata"].update({key: value}))
    with pytest.raises(ptsave.UnsupportedSourceError, match=f"{key} is"):
        apply(tmp_path, OLD)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\udcff"])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    reference.publish(tmp_path, 1, OLD, NEW)
    path = tmp_path / "weight_v000001" / reference.INDEX
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(tmp_path, reference.INDEX)


def test_shards_that_are_none(tmp_path: Path) -> None:
    folder = reference.publish(tmp_path, 1, OLD, NEW)
    data = (folder / reference.SHARD).read_bytes()
    (folder / reference.SHARD).write_bytes(data[:-1])
    assert_refused(tmp_path, "damaged or incomplete")
    tensors = {"a": bytes_of(NEW["a"])}
    save_file(tensors, folder / reference.SHARD, metadata={"b": DIGEST})
    assert_refused(tmp_path, "is not a patch with a checksum")
    save_file({"a": tensors["a"].view("int8")}, folder / reference.SHARD, metadata={"a": DIGEST})
    assert_refused(tmp_path, "is not a patch with a checksum")
    (folder / reference.SHARD).unlink()
    with pytest.raises(FileNotFoundError):
        apply(tmp_path, OLD)


def test_a_tensor_of_another_size(tmp_path: Path) -> None:
    """A vocabulary without its padded rows, for example."""
    Publisher(tmp_path, OLD).publish({"a": torch.cat([NEW["a"][:10], OLD["a"][10:]])})
    held = {"a": torch.zeros(990, dtype=torch.uint8)}
    with pytest.raises(ptsave.WrongBaseError):
        apply(tmp_path, held)
    assert not held["a"].any()


_DATA = torch.full((4,), 255, dtype=torch.uint8)
JOURNALS: dict[str, Any] = {
    "nothing": None,
    "another dict": {"version": 1},
    "no version": {"version": "x", "entries": [("model.safetensors", 0, 4, _DATA)]},
    "no files": {"version": 1, "files": 7, "entries": []},
    "other files": {"version": 1, "files": {"../blob": 1}, "entries": []},
    "a file outside": {"version": 1, "entries": [("../blob", 0, 4, _DATA)]},
    "an absolute path": {"version": 1, "entries": [("/tmp/blob", 0, 4, _DATA)]},
    "a link": {"version": 1, "entries": [("link", 0, 4, _DATA)]},
    "a linked directory": {"version": 1, "entries": [("away/blob", 0, 4, _DATA)]},
    "other data": {"version": 1, "entries": [("model.safetensors", 0, 4, _DATA.to_sparse())]},
    "data of another dtype": {"version": 1, "entries": [("model.safetensors", 0, 4, _DATA.int())]},
    "an expanded tensor": {
        "version": 1,
        "entries": [("model.safetensors", 0, 4, _DATA[:1].expand(1 << 40))],
    },
    "no data": {"version": 1, "entries": [("model.safetensors", 0, 4, [1])]},
    "a number of bytes": {"version": 1, "entries": [("model.safetensors", 0, 4, 4)]},
    "too few fields": {"version": 1, "entries": [("model.safetensors", 0)]},
    "outside of the file": {"version": 1, "entries": [("model.safetensors", 10**9, 4, _DATA)]},
    "text as numbers": {"version": 1, "entries": [("model.safetensors", "0", 4, _DATA)]},
    "no patch": {"version": 1, "entries": [("model.safetensors", 0, 100, _DATA)]},
}


@pytest.mark.parametrize("journal", JOURNALS.values(), ids=JOURNALS)
def test_journals(journal: Any, tmp_path: Path) -> None:
    """A downloaded model may have one."""
    served, outside = tmp_path / "served", tmp_path / "blob"
    ptsave.save_model(OLD, served)
    outside.write_bytes(b"untouched")
    (served / "link").symlink_to(outside)
    (served / "away").symlink_to(tmp_path)
    (served / ".weight_sync").mkdir()
    if isinstance(journal, dict):
        status = (served / "model.safetensors").stat()
        files = {"model.safetensors": [status.st_ino, status.st_size]}
        versions = os.path.realpath(tmp_path / "root")
        journal = {"files": files, "versions": versions, **journal}
    torch.save(journal, served / ".weight_sync" / "ptsave-journal.pt")
    before = (served / "model.safetensors").read_bytes()
    reference.publish(tmp_path / "root", 1, OLD, NEW)
    with pytest.raises(ptsave.CorruptCheckpointError, match="not a journal of these files"):
        apply(tmp_path / "root", served)
    assert (served / "model.safetensors").read_bytes() == before
    assert outside.read_bytes() == b"untouched"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": Infinity}', '{"version": "x"}'])
def test_states(text: str, tmp_path: Path) -> None:
    ptsave.save_model(OLD, tmp_path / "served")
    (tmp_path / "served" / ".weight_sync").mkdir()
    (tmp_path / "served" / ".weight_sync" / "state.json").write_text(text)
    reference.publish(tmp_path / "root", 1, OLD, NEW)
    with pytest.raises(ptsave.CorruptCheckpointError, match="does not say which version"):
        apply(tmp_path / "root", tmp_path / "served")


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_damaged_versions(encoding: Any, tmp_path: Path) -> None:
    """Every damage is a named error that changes nothing, or the result is exact."""
    print(seed := random.SystemRandom().randrange(1 << 32) if N_MUTATIONS > 300 else 1)
    generator = random.Random(seed)
    old = {"a": random_bits(torch.bfloat16, (600,)), "b": random_bits(torch.float32, (40,))}
    new = {name: changed(tensor, 0.1) for name, tensor in old.items()}
    folder = Path(Publisher(tmp_path / "root", old, encoding=encoding).publish(new))
    served = tmp_path / "served"
    ptsave.save_model(old, served)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    # ValueError: a tensor's name is damaged.
    named = (ptsave.CorruptCheckpointError, FileNotFoundError, ValueError)
    n_refused = 0
    for _ in range(N_MUTATIONS):
        path, data = generator.choice([*files.items()])
        damaged = bytearray(data)
        match generator.randrange(4):
            case 0:
                damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            case 1:
                del damaged[generator.randrange(len(data)) :]
            case 2:
                begin = generator.randrange(len(data))
                damaged[begin : begin + generator.randrange(16)] = generator.randbytes(8)
            case 3:
                begin, other = (generator.randrange(len(data)) for _ in range(2))
                damaged[begin : begin + 8] = data[other : other + 8]
        path.write_bytes(damaged)
        held = {name: tensor.clone() for name, tensor in old.items()}
        before = (served / "model.safetensors").read_bytes()
        for target in (held, served):
            try:
                assert apply(tmp_path / "root", target, 1) == 1
            except named:
                n_refused += 1
                assert_same_bits(held, old)
                assert (served / "model.safetensors").read_bytes() == before
            else:
                expected = held if target is held else load_file(served / "model.safetensors")
                assert_same_bits(expected, new)
                if target is served:
                    ptsave.save_model(old, served)
                    (served / ".weight_sync" / "state.json").unlink()
                held = {name: tensor.clone() for name, tensor in old.items()}
        path.write_bytes(data)
    assert n_refused > N_MUTATIONS


# ------------------------------------------------------------------------- damage with valid files


class Frames:
    """Patches of the versions 2 and 3 behind a whole one, which can be written damaged."""

    def __init__(self, root: Path, encoding: Any, generator: random.Random) -> None:
        kinds: Any = {"a": torch.bfloat16, "b": torch.float32, "c": torch.uint8}
        self.states = [{name: random_bits(kind, (90,)) for name, kind in kinds.items()}]
        for _ in range(3):
            last = self.states[-1]
            self.states.append({name: changed(each, 0.2) for name, each in last.items()})
        publisher = Publisher(root, self.states[0], encoding=encoding, max_depth=0)
        publisher.publish(self.states[1])
        publisher = Publisher(root, self.states[1], version=1, encoding=encoding, max_depth=None)
        self.folders = [Path(publisher.publish(each)) for each in self.states[2:]]
        self.contents = [reference.contents_of(folder) for folder in self.folders]
        self.files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self.generator, self.encoding = generator, encoding

    def damage(self) -> str:
        """Damage a patch so that its file is valid, and return how."""
        pick, randrange = self.generator.choice, self.generator.randrange
        number, name, kind = randrange(2), pick("abc"), pick(KINDS)
        blobs, checksums = {**self.contents[number][0]}, {**self.contents[number][1]}
        data = bytearray(zstandard.ZstdDecompressor().stream_reader(blobs[name]).read())
        count = int.from_bytes(data[:4], "little")
        match kind:
            case "tensors":
                other = pick("abc".replace(name, ""))
                blobs[name], blobs[other] = blobs[other], blobs[name]
            case "versions":
                blobs[name] = self.contents[1 - number][0][name]
            case "checksums":
                # That of the other version would say that its weights are this version's.
                checksums[name] = checksums[pick("abc".replace(name, ""))]
            case "tensor left out":
                del blobs[name], checksums[name]
            case "frame":
                blob = bytearray(blobs[name])
                blob[randrange(len(blob))] ^= 1 << randrange(8)
                blobs[name] = bytes(blob)
            case "header of the frame":
                blob = bytearray(blobs[name])
                blob[4 + randrange(6)] = randrange(256)
                blobs[name] = bytes(blob)
            case "count":
                forged = pick([0, 1, count + 1, count - 1, randrange(1 << 32)])
                data[:4] = (forged % (1 << 32)).to_bytes(4, "little")
                blobs[name] = compressed(bytes(data))
            case "positions":
                i, j = (4 + 4 * randrange(len(data) // 20) for _ in range(2))
                data[i : i + 4], data[j : j + 4] = data[j : j + 4], data[i : i + 4]
                blobs[name] = compressed(bytes(data))
            case "contents":
                for _ in range(randrange(1, 4)):
                    data[randrange(len(data))] = randrange(256)
                blobs[name] = compressed(bytes(data))
            case "size":
                blobs[name] = compressed(bytes(data)[: randrange(len(data))])
        tensors = {key: bytes_array(blob) for key, blob in blobs.items()}
        save_file(tensors, self.folders[number] / reference.SHARD, metadata=checksums)
        return f"{kind} of {name} in version {number + 2}"

    def restore(self) -> None:
        for path, data in self.files.items():
            path.write_bytes(data)


KINDS = [
    *("tensors", "versions", "checksums", "tensor left out", "frame", "header of the frame"),
    *("count", "positions", "contents", "size"),
]


def bytes_array(data: bytes) -> Any:
    return bytes_of(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_damaged_frames_in_a_chain(encoding: Any, tmp_path: Path) -> None:
    """The result is exact, or the error has a name and nothing has changed."""
    print(seed := random.SystemRandom().randrange(1 << 32) if N_MUTATIONS > 300 else 2)
    generator = random.Random(seed)
    torch.manual_seed(seed)
    root, served = tmp_path / "root", tmp_path / "served"
    frames = Frames(root, encoding, generator)
    named = (ptsave.CorruptCheckpointError, ptsave.WrongBaseError)
    counts: dict[bool, int] = {True: 0, False: 0}
    for turn in range(N_MUTATIONS):
        how = frames.damage()
        begin = generator.randrange(4)
        held = {name: tensor.clone() for name, tensor in frames.states[begin].items()}
        target: Any = held
        if turn % 10 == 0:
            ptsave.save_model(held, served)
            (served / ".weight_sync" / "state.json").unlink(missing_ok=True)
            target = served
        try:
            apply(root, target, 3, base_version=generator.choice([None, begin]))
        except named:
            expected, is_exact = frames.states[begin], False
        else:
            expected, is_exact = frames.states[3], True
        counts[is_exact] += 1
        found = held if target is held else ptsave.load(served)
        try:
            assert_same_bits(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{how}, from version {begin}: {error}") from None
        frames.restore()
    print(f"{encoding}: {counts[False]} refused, {counts[True]} exact")
    assert counts[False] > N_MUTATIONS // 4
