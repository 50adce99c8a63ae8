"""Whole versions in a chain of patches: publishers write them, and appliers begin with them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import delta_reference as reference
import pytest
import torch
import zstandard
from delta_reference import assert_same_bits, bytes_of, changed
from safetensors.torch import load_file, save_file
from test_apply import copy_of, in_killed_process, killed, publish_all, read, states
from torch import Tensor, nn

import ptsave
from ptsave.deltas import Publisher, Weights, apply, applying, fold, folding, remove, versions
from ptsave.inspection.versions import verify_versions
from ptsave.sources.locations import LocalFolder
from ptsave.streaming import payload_sources
from ptsave.support.locks import try_lock

pytestmark = pytest.mark.usefixtures("one_torch_thread")  # a pool does not outlive a fork


def kinds_in(root: Path) -> str:
    """Return a letter for each version: W for a whole one, p for patches."""
    found = ""
    for folder in sorted(root.iterdir()):
        index = folder / reference.INDEX
        text = index.read_text() if index.exists() else "{}"
        is_patch = "delta_encoding" in json.loads(text).get("metadata", {})
        found += "p" if is_patch else "W"
    return found


def steps(n: int, fraction: float = 0.001) -> list[dict[str, Tensor]]:
    """Return weights and `n` later versions, in which all tensors change."""
    found = [states(1)[0]]
    for _ in range(n):
        found.append({name: changed(tensor, fraction) for name, tensor in found[-1].items()})
    return found


def save_whole(root: Path, number: int, weights: dict[str, Tensor], size: str = "1GB") -> None:
    shutil.rmtree(root / f"weight_v{number:06d}", ignore_errors=True)
    ptsave.save_model(weights, root / f"weight_v{number:06d}", max_shard_size=size)


# ------------------------------------------------------------------------------------ publishers


@pytest.mark.parametrize(
    ("max_depth", "kinds"),
    [(8, "ppppppppWppp"), (2, "ppWppWppWppW"), (0, "W" * 12), (None, "p" * 12)],
)
@pytest.mark.parametrize("restarts", [True, False])
def test_the_depth_is_bounded(
    max_depth: int | None, kinds: str, restarts: bool, tmp_path: Path
) -> None:
    weights = steps(12)
    publisher = Publisher(tmp_path, weights[0], max_depth=max_depth)
    held = {name: bytes_of(tensor).copy() for name, tensor in weights[0].items()}
    for number, new in enumerate(weights[1:], 1):
        publisher.publish(new)
        if restarts:
            publisher = Publisher(tmp_path, new, version=number, max_depth=max_depth)
        reference.pull(tmp_path, number, held)  # as SGLang does
        for name, tensor in new.items():
            assert held[name].tobytes() == bytes_of(tensor).tobytes()
    assert kinds_in(tmp_path) == kinds
    for begin in range(13):
        model = copy_of(weights[begin])
        assert apply(tmp_path, model, base_version=begin) == 12
        assert_same_bits(model, weights[-1])


def test_patches_of_half_of_the_weights_are_enough(tmp_path: Path) -> None:
    weights = steps(3, 0.05)  # a version has a fifth of the bytes of the weights
    publish_all(tmp_path, weights, max_depth=8)
    assert kinds_in(tmp_path) == "ppW"
    dense = changed(weights[-1]["a.weight"], 1)
    Publisher(tmp_path, weights[-1], version=3).publish({**weights[-1], "a.weight": dense})
    assert kinds_in(tmp_path) == "ppWW"


def test_tied_tensors_keep_all_names(tmp_path: Path) -> None:
    old, new = torch.zeros(50), torch.rand(50)
    Publisher(tmp_path, {"a": old, "b": old}, max_depth=0).publish({"a": new, "b": new})
    held = {"a": old.clone(), "b": old.clone()}
    apply(tmp_path, held)
    assert_same_bits(held, {"a": new, "b": new})


class Tied(nn.Module):
    """Ties the embedding and the head, as many language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("max_depth", [0, 1, None])
@pytest.mark.parametrize("names", ["files", "module", "copies"])
def test_files_with_one_name_of_a_tied_weight(
    names: str, max_depth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_model` and transformers write such files; a trainer's state has all names."""
    monkeypatch.chdir(tmp_path)
    model, replica = Tied(), Tied()
    ptsave.save_model(model, "served")
    ptsave.load_model(replica, "served")
    assert "head.weight" not in load_file("served/model.safetensors")
    publisher = Publisher("root", model if names == "module" else "served", max_depth=max_depth)
    for number in range(1, 4):
        with torch.no_grad():
            model.embed.weight[number] += 1
        state = model.state_dict()
        publisher.publish(copy_of(state) if names == "copies" else model)
        assert apply("root", "served") == number
        assert apply("root", replica, base_version=number - 1) == number
        for source in ("served", Weights("root", "served"), Weights("root", "served", number)):
            loaded = Tied()
            ptsave.load_model(loaded, source)
            assert_same_bits(loaded.state_dict(), state)
        assert_same_bits(replica.state_dict(), state)
        publisher = Publisher("root", Weights("root", "served"), max_depth=max_depth)


def test_whole_versions_with_empty_tensors(tmp_path: Path) -> None:
    weights = [{"e": torch.empty(0, 3), "s": torch.tensor(i), "w": torch.randn(9)} for i in (1, 2)]
    root, served = tmp_path / "root", tmp_path / "served"
    ptsave.save_model(weights[0], served)
    publish_all(root, weights, max_depth=0)
    held = copy_of(weights[0])
    apply(root, held)
    assert_same_bits(held, weights[1])
    assert_same_bits(dict(ptsave.iter_weights(Weights(root, served))), weights[1])
    apply(root, served)
    assert_same_bits(read(served), weights[1])
    publisher = Publisher(root, weights[1], version=1, max_depth=0)
    publisher.publish(weights[0])
    assert all(not found.problems for found in verify_versions(LocalFolder(str(root))))


def test_versions_of_seven_digits(tmp_path: Path) -> None:
    weights, served = states(), tmp_path / "served"
    ptsave.save_model(weights[0], served)
    publish_all(tmp_path / "root", weights, version=999_997)
    assert sorted(os.listdir(tmp_path / "root")) == [
        "weight_v1000000", "weight_v999998", "weight_v999999"
    ]  # fmt: skip
    assert apply(tmp_path / "root", served, 999_999) == 999_999
    assert apply(tmp_path / "root", served) == 1_000_000
    assert_same_bits(read(served), weights[3])
    assert fold(tmp_path / "root").removed == [999_998, 999_999]
    held = copy_of(weights[0])
    assert apply(tmp_path / "root", held) == 1_000_000
    assert_same_bits(held, weights[3])


def test_a_restart_needs_the_weights_of_a_whole_version(tmp_path: Path) -> None:
    weights = states()
    publish_all(tmp_path, weights, max_depth=0)
    for wrong in (weights[2], {**weights[3], "a.bias": torch.zeros(34)}):
        with pytest.raises(ValueError, match="the base is not version 3"):
            Publisher(tmp_path, wrong, version=3)
    with pytest.raises(ValueError, match="max_depth must be"):
        Publisher(tmp_path, weights[3], version=3, max_depth=-1)


def test_a_dtype_that_whole_versions_cannot_hold(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(3, dtype=torch.complex128)}
    with pytest.raises(TypeError, match="complex128"):
        Publisher(tmp_path, weights)
    Publisher(tmp_path, weights, max_depth=None)


def test_padded_rows_that_only_receivers_have(tmp_path: Path) -> None:
    """A publisher that begins with the receivers' files keeps rows that the trainer never sees."""
    embedding = torch.randn(10, 8)
    served = torch.cat([embedding, torch.randn(6, 8)])
    ptsave.save_model({"embed": served, "head": torch.randn(4)}, tmp_path / "served")
    publisher = Publisher(tmp_path / "root", tmp_path / "served")
    base = ptsave.load(tmp_path / "served")
    new = {"embed": base["embed"].clone(), "head": base["head"] + 1}
    new["embed"][:10] += 1  # the trainer's rows
    publisher.publish(new)
    apply(tmp_path / "root", tmp_path / "served")
    assert_same_bits(read(tmp_path / "served"), new)
    assert torch.equal(read(tmp_path / "served")["embed"][10:], served[10:])


# -------------------------------------------------------------------------------------- appliers


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", ["1GB", "1KB"])
@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_a_whole_version_in_the_middle(
    encoding: str, in_files: bool, size: str, known: bool, tmp_path: Path
) -> None:
    weights, root, served = states(6), tmp_path / "root", tmp_path / "served"
    publish_all(root, weights, encoding=encoding)
    save_whole(root, 3, weights[3], size)
    targets = [*weights[:5], {name: torch.zeros_like(each) for name, each in weights[0].items()}]
    for begin, held in enumerate(targets):
        base = begin if known and begin < 5 else None
        for end in (3, 4, 5):
            if begin > end and begin < 5:
                continue
            if in_files:
                shutil.rmtree(served, ignore_errors=True)
                ptsave.save_model(held, served, max_shard_size="1KB")
                assert apply(root, served, end, base_version=base) == end
                assert_same_bits(ptsave.load(served), weights[end])  # compares CRCs
            else:
                model = copy_of(held)
                assert apply(root, model, end, base_version=base) == end
                assert_same_bits(model, weights[end])


def test_an_equal_target_stays(tmp_path: Path) -> None:
    weights, served = states(2), tmp_path / "served"
    save_whole(tmp_path / "root", 1, weights[1])
    ptsave.save_model(weights[1], served)
    before = (served / "model.safetensors").stat().st_mtime_ns
    model = nn.Linear(2, 2)
    assert apply(tmp_path / "root", served) == 1
    assert (served / "model.safetensors").stat().st_mtime_ns == before
    save_whole(tmp_path / "other", 1, model.state_dict())
    count = model.weight._version
    apply(tmp_path / "other", model)
    assert model.weight._version == count


@pytest.mark.parametrize("size", ["1GB", "1KB"])
def test_an_empty_directory(size: str, tmp_path: Path) -> None:
    weights, root, served = states(5), tmp_path / "root", tmp_path / "served"
    publish_all(root, weights)
    served.mkdir()
    with pytest.raises(FileNotFoundError, match="served"):
        apply(root, served)
    assert [*served.iterdir()] == []
    save_whole(root, 2, weights[2], size)
    (served / "config.json").touch()
    for target in (served, root):  # also the directory of the versions
        before = sorted(target.rglob("*"))
        with pytest.raises(ValueError, match=f"{target.name} has no complete model, but is not em"):
            apply(root, target)
        assert sorted(target.rglob("*")) == before
    (served / "config.json").unlink()
    (served / ".weight_sync").mkdir()
    (served / ".weight_sync" / "state.json").write_text('{"version": "000004"}')  # of lost files
    with pytest.raises(FileNotFoundError, match="served"):
        apply(root, served, 1)
    assert apply(root, served, 3) == 3
    assert_same_bits(ptsave.load(served), weights[3])
    assert apply(root, served) == 4
    assert_same_bits(ptsave.load(served), weights[4])
    with pytest.raises(FileNotFoundError):
        apply(root, tmp_path / "missing")
    assert not (tmp_path / ".weight_sync").exists()


def test_a_copy_of_shards_in_folders_is_begun_again(tmp_path: Path) -> None:
    weights, root, served = states(1)[0], tmp_path / "root", tmp_path / "served"
    save_whole(root, 1, weights, "1KB")
    whole = root / "weight_v000001"
    index = json.loads((whole / reference.INDEX).read_bytes())
    (whole / "parts").mkdir()
    for shard in {*index["weight_map"].values()}:
        (whole / shard).rename(whole / "parts" / shard)
    places = {name: f"parts/{shard}" for name, shard in index["weight_map"].items()}
    (whole / reference.INDEX).write_text(json.dumps({**index, "weight_map": places}))
    (served / "parts").mkdir(parents=True)  # a killed call has copied one shard
    first = min(places.values())
    shutil.copy(whole / first, served / first)
    assert apply(root, served) == 1
    assert_same_bits(ptsave.load(served), weights)


@pytest.mark.usefixtures("_clean_file_systems")
def test_whole_versions_at_a_url(tmp_path: Path) -> None:
    weights = states()
    publisher = Publisher("memory://versions", weights[0], max_depth=1)
    for each in weights[1:]:
        publisher.publish(each)
    (tmp_path / "served").mkdir()
    assert apply("memory://versions", tmp_path / "served") == 3
    assert_same_bits(ptsave.load(tmp_path / "served"), weights[3])
    Publisher("memory://versions", weights[3], version=3, max_depth=1)


write_copy = payload_sources.write_copy


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_kill_while_an_empty_directory_is_filled(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, root, served = states(3), tmp_path / "root", tmp_path / "served"
    save_whole(root, 1, weights[1], "1KB")
    reference.publish(root, 2, weights[1], weights[2])
    served.mkdir()
    calls = 0

    def copy(*args: Any, **options: Any) -> None:
        nonlocal calls
        if calls == place:
            killed()
        calls += 1
        write_copy(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(applying, "write_copy", copy)
        if place == 3:
            patch.setattr(applying, "_apply_to_files", killed)
        in_killed_process(lambda: apply(root, served))
    assert apply(root, served) == 2
    assert_same_bits(ptsave.load(served), weights[2])


def test_whole_versions_that_do_not_fit(tmp_path: Path) -> None:
    weights, root = states(2), tmp_path / "root"
    scale, bias = weights[1]["b.scale"], weights[1]["a.bias"]
    for wrong, match in (
        ({"b.scale": scale[None]}, r"b\.scale is torch.float32 \[\] in the target, but .* \[1\]"),
        ({"a.bias": bias.view(torch.int32)}, r"torch.float32 \[33\] .*, but torch.int32 \[33\] in"),
        ({"more": scale + 1}, "has no tensor more"),
    ):
        save_whole(root, 1, {**weights[1], **wrong})
        held = copy_of(weights[0])
        with pytest.raises(ValueError, match=match):
            apply(root, held)
        assert_same_bits(held, weights[0])


def test_damaged_whole_versions(tmp_path: Path) -> None:
    weights, root = states(2), tmp_path / "root"
    save_whole(root, 1, weights[1])
    path = root / "weight_v000001" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    held = copy_of(weights[0])
    with pytest.raises(ptsave.CorruptCheckpointError, match="the checksum differs"):
        apply(root, held)
    path.write_bytes(data[:-1])
    with pytest.raises(ptsave.CorruptCheckpointError, match="incomplete"):
        apply(root, held)
    path.unlink()
    torch.save(weights[1], root / "weight_v000001" / "model.safetensors")
    with pytest.raises(ptsave.UnsupportedSourceError, match="only safetensors files"):
        apply(root, held)
    path.unlink()
    save_file({"a.bias": weights[1]["a.bias"]}, path.with_name("one.safetensors"))
    index = {"weight_map": {"a.bias": "one.safetensors", "a.weight": "one.safetensors"}}
    path.with_name(reference.INDEX).write_text(json.dumps(index))
    with pytest.raises(ptsave.CorruptCheckpointError, match=r"a\.weight is not in this shard"):
        apply(root, held)
    assert_same_bits(held, weights[0])


# --------------------------------------------------------------------------------------- folding


@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32", "blake3"])
@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_folding(encoding: Any, checksum: Any, tmp_path: Path) -> None:
    weights = states(6)
    publisher = publish_all(tmp_path, weights, encoding=encoding, checksum=checksum)
    done = fold(tmp_path, dry_run=True)
    assert len(os.listdir(tmp_path)) == 5
    assert fold(tmp_path, fsync=True) == done
    assert done._replace(n_tensors=0, nbytes_before=0, nbytes=0) == (
        str(tmp_path / "weight_v000005"), 0, [1, 2, 3, 4], 0, 0, 0
    )  # fmt: skip
    assert done.nbytes < done.nbytes_before
    assert os.listdir(tmp_path) == ["weight_v000005"]
    assert len(os.listdir(tmp_path / "weight_v000005")) == 2
    assert fold(tmp_path).removed == []  # once more
    for begin in range(6):
        for base in (None, begin):
            held = copy_of(weights[begin])
            if encoding == "overwrite" or begin in (0, 5):
                assert apply(tmp_path, held, base_version=base) == 5
                assert_same_bits(held, weights[5])
            elif base is None:
                with pytest.raises(ptsave.WrongBaseError):
                    apply(tmp_path, held)
            else:
                with pytest.raises(ValueError, match="and not on version"):
                    apply(tmp_path, held, base_version=base)
    pulled = {name: bytes_of(tensor).copy() for name, tensor in weights[0].items()}
    index = tmp_path / "weight_v000005" / reference.INDEX
    index.write_text(
        index.read_text().replace('"base_version": "000000"', '"base_version": "000004"')
    )
    reference.pull(tmp_path, 5, pulled)
    assert {name: each.tobytes() for name, each in pulled.items()} == {
        name: bytes_of(tensor).tobytes() for name, tensor in weights[5].items()
    }
    assert publisher.version == 5


def test_folding_in_several_steps(tmp_path: Path) -> None:
    """Between whole versions, and with a publisher that goes on."""
    weights = states(9)
    publisher = Publisher(tmp_path, weights[0], max_depth=None)
    for number, new in enumerate(weights[1:], 1):
        publisher.publish(new)
        if number == 3:
            save_whole(tmp_path, 3, new)
        if number in (5, 6, 8):
            assert fold(tmp_path).base == 3
    assert sorted(os.listdir(tmp_path)) == [f"weight_v00000{n}" for n in (1, 2, 3, 8)]
    assert (
        json.loads((tmp_path / "weight_v000008" / reference.INDEX).read_text())["metadata"][
            "folded_from"
        ]
        == "000004"
    )
    for begin in range(9):
        held = copy_of(weights[begin])
        assert apply(tmp_path, held) == 8
        assert_same_bits(held, weights[8])
    shutil.rmtree(tmp_path / "weight_v000008")
    assert fold(tmp_path) == (str(tmp_path / "weight_v000003"), 3, [], 0, 0, 0)
    shutil.rmtree(tmp_path / "weight_v000003")
    for name in ("weight_v000001", "weight_v000002"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="there is no version"):
        fold(tmp_path)


def test_versions_that_revert_changes(tmp_path: Path) -> None:
    """A folded patch has all positions, also those with the old value."""
    states = [{"a": torch.tensor([i, 0, 0, i, 7], dtype=torch.uint8)} for i in (1, 2, 1, 1)]
    publish_all(tmp_path, states)
    fold(tmp_path)
    for begin in states:
        held = copy_of(begin)
        apply(tmp_path, held)
        assert_same_bits(held, states[-1])


def test_forms_that_do_not_mix(tmp_path: Path) -> None:
    weights = states(3)
    reference.publish(tmp_path, 1, weights[0], weights[1], ("xor", "adler32"))
    reference.publish(tmp_path, 2, weights[1], weights[2])
    before = tree_of(tmp_path)
    with pytest.raises(
        ValueError, match=r"several forms \(overwrite with xxh3-128, xor with adler32"
    ):
        fold(tmp_path)
    assert tree_of(tmp_path) == before


def tree_of(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


FOLD_STEPS: list[tuple[Any, str, int, bool]] = [
    (module, name, n_calls, is_before)
    for n_calls in (1, 2)
    for is_before in (True, False)
    for module, name in (
        (versions, "write_patches"),
        (versions, "write_safetensors"),
        (versions, "write_bytes"),
        (LocalFolder, "remove"),
        (folding, "_remove"),
        (LocalFolder, "remove_all"),
        (shutil, "rmtree"),
        (os, "unlink"),
    )
]


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
@pytest.mark.parametrize("step", FOLD_STEPS, ids=str)
def test_a_kill_while_a_chain_is_folded(
    step: tuple[Any, str, int, bool], encoding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, n_calls, is_before = step
    weights = states(4)
    publish_all(tmp_path, weights, encoding=encoding)
    call = getattr(module, name)
    n_left = n_calls

    def kill_in_it(*args: Any, **options: Any) -> Any:
        nonlocal n_left
        n_left -= 1
        if n_left == 0 and is_before:
            killed()
        found = call(*args, **options)
        if n_left == 0:
            killed()
        return found

    def fold_and_die() -> None:
        fold(tmp_path)
        killed()  # there was no second call

    with monkeypatch.context() as patch:
        patch.setattr(module, name, kill_in_it)
        in_killed_process(fold_and_die)
    held = copy_of(weights[0])
    assert apply(tmp_path, held) == 3
    assert_same_bits(held, weights[3])
    fold(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name != "weight_v000003"]
    assert len(os.listdir(tmp_path / "weight_v000003")) == 2
    held = copy_of(weights[0])
    assert apply(tmp_path, held) == 3
    assert_same_bits(held, weights[3])


def test_two_foldings(tmp_path: Path) -> None:
    publish_all(tmp_path, states())
    (tmp_path / ".weight_v000003.ptsave").mkdir()
    lock = os.open(tmp_path / ".weight_v000003.ptsave" / "lock", os.O_RDWR | os.O_CREAT)
    assert try_lock(lock)
    with pytest.raises(ptsave.SaveError, match="another process is saving there"):
        fold(tmp_path)
    os.close(lock)
    assert fold(tmp_path).removed == [1, 2]


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_a_bomb_is_not_folded(encoding: Any, tmp_path: Path) -> None:
    for number in (1, 2):
        stream = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 28)
        frame = b"".join([*(stream.compress(bytes(1 << 24)) for _ in range(16)), stream.flush()])
        frame = frame if encoding == "overwrite" else frame[:-9]
        reference.write_version(tmp_path, number, {"a": frame}, {"a": "0"}, encoding=encoding)
    before = tree_of(tmp_path)
    with pytest.raises(ptsave.CorruptCheckpointError, match=r"it expands to|of the tensor's"):
        fold(tmp_path)
    assert tree_of(tmp_path) == before


@pytest.mark.usefixtures("_clean_file_systems")
def test_folding_and_removing_at_a_url() -> None:
    weights = states(6)
    publisher = Publisher("memory://versions", weights[0], max_depth=2)
    for each in weights[1:]:
        publisher.publish(each)  # ppWpp
    assert fold("memory://versions").removed == [4]
    remove("memory://versions", 2)
    held = copy_of(weights[0])
    assert apply("memory://versions", held) == 5
    assert_same_bits(held, weights[5])


def test_removing(tmp_path: Path) -> None:
    weights = steps(5)
    publish_all(tmp_path, weights, max_depth=2)  # ppWpp
    for needed, match in (
        (1, "version 2 is based on"),
        (3, "version 4 is based on"),
        (5, "newest"),
    ):
        with pytest.raises(ValueError, match=match):
            remove(tmp_path, needed)
    with pytest.raises(FileNotFoundError, match="there is no such version"):
        remove(tmp_path, 9)
    (tmp_path / "weight_v000002" / reference.INDEX).unlink()  # by a killed process
    remove(tmp_path, 2)
    remove(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == [f"weight_v00000{n}" for n in (3, 4, 5)]
    held = copy_of(weights[0])
    assert apply(tmp_path, held) == 5
    assert_same_bits(held, weights[5])
