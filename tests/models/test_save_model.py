"""save_model: what stock readers make of it, and what a reader finds while a set is replaced."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from _system import in_child
from _weights import assert_equal, tied_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stock_comparison import assert_same_object
from torch import Tensor, nn
from warm_python import run_warm

import ptsave
from ptsave.contents.safetensors import safetensors_dtypes
from ptsave.models import save_model as sharded_saving
from ptsave.streaming.payload_sources import write_bytes
from ptsave.support.calls import parse_size

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

FORMATS: Any = ("safetensors", "pt")
SUFFIX = {"safetensors": ".safetensors", "pt": ".bin"}
INDEX = {"safetensors": "model.safetensors.index.json", "pt": "pytorch_model.bin.index.json"}
SINGLE = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}


def make_model(seed: int = 0, n_layers: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(n_layers)))


def read_stock(folder: Path, kind: str) -> dict[str, Tensor]:
    """Read a set with torch and the safetensors library alone, each tensor where the index says."""
    load: Callable[[Path], Any] = load_file if kind == "safetensors" else torch.load
    if not (folder / INDEX[kind]).exists():
        return dict(load(folder / SINGLE[kind]))
    index = json.loads((folder / INDEX[kind]).read_text())
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        shard = load(folder / name)
        assert set(shard) == {key for key, value in index["weight_map"].items() if value == name}
        tensors.update(shard)
    return tensors


def read_index(folder: Path, kind: str) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX[kind]).read_text())["weight_map"]
    return weight_map


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# ------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_in_one_file(tmp_path: Path, kind: Any) -> None:
    model = make_model()
    ptsave.save_model(model, tmp_path / "new" / "folder", format=kind)
    assert names_in(tmp_path / "new" / "folder") == [SINGLE[kind]]
    assert_equal(read_stock(tmp_path / "new" / "folder", kind), model.state_dict())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("fsync", [False, True])
def test_shards_are_full_but_for_what_does_not_fit(tmp_path: Path, kind: Any, fsync: bool) -> None:
    model = make_model()
    ptsave.save_model(model, str(tmp_path), max_shard_size=2500, format=kind, fsync=fsync)
    stem = SINGLE[kind].removesuffix(SUFFIX[kind])
    shards = [f"{stem}-{number:05}-of-00002{SUFFIX[kind]}" for number in (1, 2)]
    assert names_in(tmp_path) == sorted([*shards, INDEX[kind]])
    assert_equal(read_stock(tmp_path, kind), model.state_dict())
    index = json.loads((tmp_path / INDEX[kind]).read_text())
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert index["metadata"] == {"total_size": nbytes}
    assert index["weight_map"]["0.weight"] == shards[0]
    assert index["weight_map"]["3.bias"] == shards[1]


@pytest.mark.parametrize(("size", "n_shards"), [(200, 1), (199, 2)])
def test_a_shard_may_have_exactly_its_size(tmp_path: Path, size: int, n_shards: int) -> None:
    tensors = {"a": torch.randn(25), "b": torch.randn(25)}
    ptsave.save_model(tensors, tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == n_shards


@pytest.mark.parametrize("kind", FORMATS)
def test_a_tensor_larger_than_a_shard_has_its_own(tmp_path: Path, kind: Any) -> None:
    tensors = {"a": torch.randn(2), "b": torch.randn(1000), "c": torch.randn(2)}
    ptsave.save_model(tensors, tmp_path, max_shard_size=100, format=kind)
    index = json.loads((tmp_path / INDEX[kind]).read_text())
    assert len(set(index["weight_map"].values())) == 3
    assert_equal(read_stock(tmp_path, kind), tensors)


def test_a_model_without_tensors(tmp_path: Path) -> None:
    for kind in FORMATS:
        ptsave.save_model(nn.ReLU(), tmp_path, format=kind)
        assert read_stock(tmp_path, kind) == {}
    assert not any(ptsave.load_model(nn.ReLU(), tmp_path))


@pytest.mark.parametrize("kind", FORMATS)
def test_tied_weights_are_stored_once(tmp_path: Path, kind: Any) -> None:
    model = tied_model()
    for size in (1 << 30, 64):
        ptsave.save_model(model, tmp_path, max_shard_size=size, format=kind)
        found = read_stock(tmp_path, kind)
        state = model.state_dict()
        if kind == "pt":
            assert_equal(found, state)
            assert found["first.weight"].data_ptr() == found["second.weight"].data_ptr()
        else:
            assert_equal(found, {name: state[name] for name in ("first.weight", "one")})
        other = tied_model()
        ptsave.load_model(other, tmp_path)
        assert_equal(other.state_dict(), state)


def test_safetensors_files_say_what_they_are_and_what_is_tied(tmp_path: Path) -> None:
    ptsave.save_model(tied_model(), tmp_path, checksums=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "second.weight": "first.weight",
            "two": "one",
        }


@pytest.mark.parametrize("kind", FORMATS)
def test_layouts_of_memory(tmp_path: Path, kind: Any) -> None:
    base = torch.randn(6, 8)
    tensors = {
        "whole": base,
        "part": base[1:3],
        "overlapping": base[2:5],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.randn(2)),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "other empty": torch.zeros(0, 3),
        "bfloat16": torch.randn(3).bfloat16(),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
    }
    ptsave.save_model(tensors, tmp_path, format=kind)
    found = read_stock(tmp_path, kind)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        if tensor.dtype == torch.float8_e4m3fn:
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        else:
            assert torch.equal(found[name], tensor.detach()), name
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert (tmp_path / SINGLE[kind]).stat().st_size < stored + 6000


# -------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("2GiB", 2 << 30),
        ("1.5 kib", 1536),
        ("100", 100),
        (7, 7),
    ],
)
def test_sizes(size: int | str, nbytes: int) -> None:
    assert parse_size(size, "max_shard_size") == nbytes


NO_SIZES = ["", "GB", "-1GB", "5 bytes", "1e9", 0, -5, 2.5, None, True, "0"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        *(({"max_shard_size": size}, ValueError, "max_shard_size") for size in NO_SIZES),
        ({"fsync": "yes"}, TypeError, "fsync must be True or False, not 'yes'"),
        ({"format": "gguf"}, ValueError, "'gguf'"),
    ],
)
def test_options_that_are_none(
    tmp_path: Path, options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ptsave.save_model(make_model(), tmp_path / "model", **options)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "state",
    [
        {"a": 1},
        {1: torch.ones(1)},
        [torch.ones(1)],
        {"a": torch.ones(2, 2).to_sparse()},
        {"a": torch.ones(2, device="meta")},
    ],
)
def test_what_is_no_state_dict_of_tensors(tmp_path: Path, state: Any) -> None:
    with pytest.raises(TypeError):
        ptsave.save_model(state, tmp_path)
    assert names_in(tmp_path) == []


# ---------------------------------------------------------------------------------- replacing a set


def steps_of_the_file_system(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Return a list; what is in it is called before each step that others can see."""
    watchers: list[Callable[[], None]] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            for watcher in watchers:
                watcher()
            return call(*arguments, **keywords)

        return step

    monkeypatch.setattr(os, "unlink", watched(os.unlink))
    for name in ("save", "write_safetensors", "write_bytes"):  # each ends with a rename
        write = getattr(sharded_saving, name)
        monkeypatch.setattr(sharded_saving, name, watched(write))
    return watchers


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("before", [1 << 30, 3000, 1000])
@pytest.mark.parametrize("after", [1 << 30, 3000, 1000])
def test_a_reader_finds_the_old_set_or_the_new_one_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, before: int, after: int
) -> None:
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "1")
    (tmp_path / "config.json").write_text("{}")
    old, new = make_model(0, 6), make_model(1, 6)
    ptsave.save_model(old, tmp_path, max_shard_size=before, format=kind)
    seen: list[int] = []

    def look() -> None:
        model = make_model(2, 6)
        ptsave.load_model(model, tmp_path)
        weight = model.state_dict()["0.weight"]
        seen.append(0 if torch.equal(weight, old.state_dict()["0.weight"]) else 1)
        assert_equal(model.state_dict(), (old, new)[seen[-1]].state_dict())

    with monkeypatch.context() as patch:
        steps_of_the_file_system(patch).append(look)
        ptsave.save_model(new, tmp_path, max_shard_size=after, format=kind)
    look()
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 1)
    assert_equal(read_stock(tmp_path, kind), new.state_dict())
    used = {"config.json", SINGLE[kind]}
    if (tmp_path / INDEX[kind]).exists():
        used = {"config.json", INDEX[kind], *read_index(tmp_path, kind).values()}
    assert set(names_in(tmp_path)) == used


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("before", [0, 1 << 30, 3000])
@pytest.mark.parametrize("after", [1 << 30, 3000])
def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, before: int, after: int
) -> None:
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "1")
    if before:
        ptsave.save_model(make_model(0), tmp_path, max_shard_size=before, format=kind)
    files = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    n_steps = 0

    def fail() -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps == (1 if after > 3000 else 2):
            raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        steps_of_the_file_system(patch).append(fail)
        with pytest.raises(ptsave.SaveError, match="No space left"):
            ptsave.save_model(make_model(1), tmp_path, max_shard_size=after, format=kind)
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == files


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("before", [1 << 30, 3000])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_nothing_is_undone_once_the_index_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, before: int, error: BaseException
) -> None:
    ptsave.save_model(make_model(0), tmp_path, max_shard_size=before, format=kind)

    def write(*args: Any, **kwargs: Any) -> None:
        write_bytes(*args, **kwargs)
        raise error  # as an fsync of the directory, or a signal

    with monkeypatch.context() as patch:
        patch.setattr(sharded_saving, "write_bytes", write)
        with pytest.raises(type(error)):
            ptsave.save_model(make_model(1), tmp_path, max_shard_size=3000, format=kind)
    (tmp_path / SINGLE[kind]).unlink(missing_ok=True)  # what readers prefer to an index
    assert_equal(read_stock(tmp_path, kind), make_model(1).state_dict())
    ptsave.save_model(make_model(2), tmp_path, max_shard_size=3000, format=kind)
    assert_equal(read_stock(tmp_path, kind), make_model(2).state_dict())
    assert len(names_in(tmp_path)) == len(set(read_index(tmp_path, kind).values())) + 1


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(ptsave.SaveError) as caught:
            ptsave.save_model({"a": torch.ones(1 << 20)}, tmp_path)
        assert caught.value.errno == errno.EFBIG
        assert caught.value.filename == str(tmp_path / "model.safetensors")

    in_child(save, lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
    assert names_in(tmp_path) == []


NO_THREADS = """
import _thread, sys, threading, torch, ptsave
def fail(*arguments, **keywords):
    raise RuntimeError("can't start new thread")
_thread.start_new_thread = threading._start_new_thread = fail
threading._start_joinable_thread = fail
model = {str(i): torch.full((100, 10), float(i)) for i in range(4)}
for kind in ("safetensors", "pt"):
    for size in (1000, 1 << 30):
        ptsave.save_model(model, f"{sys.argv[1]}/{kind}-{size}", max_shard_size=size, format=kind)
"""


def test_no_thread_can_be_started(tmp_path: Path) -> None:
    run_warm(NO_THREADS, tmp_path)
    expected = {str(i): torch.full((100, 10), float(i)) for i in range(4)}
    for folder in tmp_path.iterdir():
        assert_equal(read_stock(folder, folder.name.partition("-")[0]), expected)
    assert len(names_in(tmp_path)) == 4


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_modes_are_those_of_the_umask_or_of_the_replaced_file(
    tmp_path: Path, kind: Any, umask: int
) -> None:
    def modes() -> dict[str, int]:
        return {name: os.stat(tmp_path / name).st_mode & 0o7777 for name in names_in(tmp_path)}

    before = os.umask(umask)
    try:
        for size in (1000, 1 << 30):
            ptsave.save_model(make_model(), tmp_path, max_shard_size=size, format=kind)
            assert set(modes().values()) == {0o666 & ~umask}
        (tmp_path / SINGLE[kind]).chmod(0o640)
        ptsave.save_model(make_model(), tmp_path, format=kind)
        assert modes() == {SINGLE[kind]: 0o640}
        ptsave.save_model(make_model(), tmp_path, max_shard_size=1000, format=kind)
        (tmp_path / INDEX[kind]).chmod(0o604)
        ptsave.save_model(make_model(1), tmp_path, max_shard_size=1000, format=kind)
        assert modes()[INDEX[kind]] == 0o604
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, kind: Any) -> None:
    blob = tmp_path / "blobs" / "x"
    blob.parent.mkdir()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / SINGLE[kind]).symlink_to("../blobs/x")
    ptsave.save_model(make_model(), folder, format=kind)
    assert (folder / SINGLE[kind]).is_symlink()
    assert not blob.is_symlink()
    assert_equal(read_stock(folder, kind), make_model().state_dict())


def test_the_bytes_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    for name, tensors in awkward_state_dicts().items():
        ptsave.save_model(tensors, tmp_path / "ours", checksums=False)
        save_file(tensors, tmp_path / "stock.safetensors", {"format": "pt"})
        ours = (tmp_path / "ours" / "model.safetensors").read_bytes()
        assert ours == (tmp_path / "stock.safetensors").read_bytes(), name


def awkward_state_dicts() -> dict[str, dict[str, Tensor]]:
    base = torch.arange(48.0).view(6, 8)
    numbers = torch.arange(24, dtype=torch.uint8)
    dtypes = [dtype for dtype in safetensors_dtypes() if dtype != torch.float4_e2m1fn_x2][::-1]
    names = ["", "b", "B", "\u00e9\u4e2d\U0001f600", 'a"\\/\n\t\0\x7f', "\u2028"]
    return {
        "nothing": {},
        "scalar": {"a": torch.tensor(1.5), "b": torch.tensor(True)},
        "empty": {"a": torch.zeros(0, 3), "b": torch.zeros(3, 0), "c": torch.ones(1)},
        "every dtype": {
            f"x{i}": numbers.clone().view(dtype) for i, dtype in enumerate(dtypes[::-1])
        },
        "in pairs": {
            "a": numbers.clone().view(4, 6).view(torch.float4_e2m1fn_x2),
            "b": numbers.clone(),
            "c": torch.zeros(2, 0, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        },
        "part of a storage": {"a": base[1:3], "b": torch.ones(3)[2:]},
        "one stride of many": {"a": base.t()[:, :1].t(), "b": torch.ones(1, 4).t()},
        "names": {name: torch.full((2,), float(i)) for i, name in enumerate(names)},
        "many": {f"layers.{i}.w": torch.full((i % 7,), float(i)) for i in range(300)},
        "parameter": {"a": nn.Parameter(torch.ones(3)), "b": torch.ones(2, requires_grad=True)},
    }


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"a": torch.ones(1), "b": torch.ones(1).to(torch.complex128)}, TypeError, "complex128"),
        ({"__metadata__": torch.ones(1)}, ValueError, "rename"),
        ({"\ud800": torch.ones(1)}, ValueError, "rename"),
        (
            {"a": torch.tensor(0, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
            ValueError,
            "reshape",
        ),
    ],
)
def test_what_safetensors_cannot_hold_is_said_before_anything_is_written(
    tmp_path: Path, tensors: Any, error: type[Exception], message: str
) -> None:
    ptsave.save_model(make_model(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(error, match=message):
        ptsave.save_model(tensors, tmp_path)
    assert names_in(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_storage_that_was_let_go_of_is_refused(tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="no memory"):
        ptsave.save_model({"a": tensor}, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_a_killed_save_has_left_goes_with_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / ".model.safetensors.0123456789abcdef.ptsave"
    leftover.write_bytes(b"half")
    stale = tmp_path / "model-deadbeef-00001-of-00009.safetensors"
    stale.write_bytes(b"half")
    model = make_model()
    ptsave.save_model(model, tmp_path)
    assert names_in(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("place", ["file", "missing/../file/x"])
def test_where_no_directory_can_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ptsave.SaveError) as caught:
        ptsave.save_model(make_model(), tmp_path / place)
    assert caught.value.errno
    assert caught.value.filename


@pytest.mark.parametrize("kind", ["path", "pathlib", "url"])
def test_one_safetensors_file(tmp_path: Path, kind: str) -> None:
    """A name that ends so is a file, as for the library; of a model, or of any dict of tensors."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    model[0].bias = model[1].bias  # tied
    path: Any = tmp_path / "model.safetensors"
    target = {"path": str(path), "pathlib": path, "url": "memory://one/model.safetensors"}[kind]
    ptsave.save_model(model, target, fsync=kind == "path")
    if kind == "url":
        fsspec.filesystem("memory").get("/one/model.safetensors", str(path))
    tensors = load_file(path)
    assert len(tensors) == 3
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    fresh[0].bias = fresh[1].bias
    ptsave.load_model(fresh, path)
    assert_same_object(fresh.state_dict(), model.state_dict())
    ptsave.save_model({"a": torch.ones(2)}, path)  # replaces it
    assert_same_object(load_file(path), {"a": torch.ones(2)})
    cases: tuple[dict[str, Any], ...] = ({"format": "pt"}, {"max_shard_size": "1GB"})
    for options in cases:
        with pytest.raises(ValueError, match="are for directories"):
            ptsave.save_model(model, path, **options)
    with pytest.raises(TypeError, match="not a tensor"):
        ptsave.save_model({"a": 1}, path)  # type: ignore[dict-item]
    with pytest.raises(ptsave.SaveError):
        ptsave.save_model(model, tmp_path / "missing" / "model.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    ptsave.save_model(model, tmp_path / "folder.safetensors")
    assert os.listdir(tmp_path / "folder.safetensors") == ["model.safetensors"]
