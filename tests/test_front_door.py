"""One front door: every operation takes every kind of checkpoint, from anywhere, under any name.

Each cell of the table (kind, way to name or hand it over, operation) is compared with the result
for the same tensors in a ``.pt`` file.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from _corruption import flip
from command_line import succeed
from reports import list_file, verify_directory
from safetensors.torch import load_file, save_file

import ptsave
from ptsave.inspection.extraction import read_entries
from ptsave.inspection.pickle_globals import required_globals, unsafe_globals
from ptsave.inspection.verification import verify_file
from ptsave.sources.locations import describe

STATE = {
    "layer.weight": torch.arange(64.0).reshape(8, 8),
    "layer.bias": torch.linspace(-1, 1, 8),
    "norm": torch.ones(3, dtype=torch.bfloat16),
}
PADDING = b"something in front"  # of what is in a file object

State = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------------- kinds


def new_folder(*parts: Any) -> Path:
    folder = Path(*parts)
    folder.mkdir()
    return folder


def write_pt(folder: Path, name: str, **options: Any) -> Path:
    torch.save(STATE, folder / name, **options)
    return folder / name


def write_legacy(folder: Path, name: str) -> Path:
    return write_pt(folder, name, _use_new_zipfile_serialization=False)


def write_safetensors(folder: Path, name: str) -> Path:
    save_file(STATE, folder / name)
    return folder / name


def write_shards(folder: Path, **options: Any) -> Path:
    ptsave.save_model(STATE, folder / "model", max_shard_size=200, **options)
    return folder / "model"


def write_index(folder: Path, name: str = "model.safetensors.index.json") -> Path:
    index = write_shards(folder) / "model.safetensors.index.json"
    return index.rename(index.with_name(name))


def write_shards_of_all_kinds(folder: Path) -> Path:
    """Shards of which one has the wrong name, and one is old, without an index."""
    model = new_folder(folder, "model")
    a, b, c = ({name: tensor} for name, tensor in STATE.items())
    save_file(a, model / "model-1-of-3.pt")
    torch.save(b, model / "model-2-of-3.pt")
    torch.save(c, model / "model-3-of-3.pt", _use_new_zipfile_serialization=False)
    return model


def write_alone(folder: Path) -> Path:
    """A directory whose only checkpoint has a name that says nothing."""
    model = new_folder(folder, "model")
    write_pt(model, "last.checkpoint")
    (model / "config.json").write_text("{}")
    return model


FILES: dict[str, Callable[[Path], Path]] = {
    "pt": lambda folder: write_pt(folder, "model.pt"),
    "pt called .safetensors": lambda folder: write_pt(folder, "model.safetensors"),
    "pt called .index.json": lambda folder: write_pt(folder, "model.safetensors.index.json"),
    "pt without suffix": lambda folder: write_pt(folder, "model"),
    "legacy": lambda folder: write_legacy(folder, "model.pt"),
    "legacy called .safetensors": lambda folder: write_legacy(folder, "model.safetensors"),
    "safetensors": lambda folder: write_safetensors(folder, "model.safetensors"),
    "safetensors called .bin": lambda folder: write_safetensors(folder, "model.bin"),
    "safetensors called .pt": lambda folder: write_safetensors(folder, "model.pt"),
}
SETS: dict[str, Callable[[Path], Path]] = {
    "shards": write_shards,
    "pickled shards": lambda folder: write_shards(folder, format="pt"),
    "shards of all kinds": write_shards_of_all_kinds,
    "a directory with one checkpoint": write_alone,
    "index": write_index,
    "index called otherwise": lambda folder: write_index(folder, "which.txt"),
}
KINDS = {**FILES, **SETS}


# ----------------------------------------------------------------------------------------- carriers


class OtherBytesIO(io.BytesIO):
    """A file object that only Python can read."""


def in_memory(path: Path) -> str:
    """Copy a file, with its neighbours, or a directory to fsspec's memory; return its URL."""
    fsspec.filesystem("memory").put(str(path.parent) + "/", "/front/door/", recursive=True)
    return f"memory://front/door/{path.name}"


def in_zip(path: Path) -> str:
    """Pack a file, with its neighbours, or a directory into a zip archive; return its URL in it."""
    archive = shutil.make_archive(str(path.parent), "zip", path.parent)
    return f"zip://{path.name}::file://{archive}"


def at_end_of(stream: Any, path: Path) -> Any:
    """Append a file to the padding in a stream, at whose end the stream is left."""
    stream.write(PADDING)
    stream.write(path.read_bytes())
    stream.seek(len(PADDING))
    return stream


def fsspec_stream(path: Path) -> Any:
    in_memory(path)
    return fsspec.open(f"memory://front/door/{path.name}", "rb").open()


NAMES: dict[str, Callable[[Path], Any]] = {
    "str": str,
    "Path": Path,
    "file URL": lambda path: f"file://{path}",
    "memory URL": in_memory,
    "URL in a zip": in_zip,
}
STREAMS: dict[str, Callable[[Path], Any]] = {
    "BytesIO": lambda path: at_end_of(io.BytesIO(), path),
    "subclass of BytesIO": lambda path: at_end_of(OtherBytesIO(), path),
    "open file": lambda path: at_end_of(path.with_name("padded").open("w+b"), path),
    "unbuffered file": lambda path: at_end_of(path.with_name("padded").open("w+b", 0), path),
    "fsspec file": fsspec_stream,
}
# What a file is and where it is are two decisions: each kind by its path, a few in all ways.
IN_ALL_WAYS = ["pt", "legacy", "safetensors"]
CELLS = [(kind, "str") for kind in KINDS]
CELLS += [(kind, "memory URL") for kind in ("pt called .safetensors", "safetensors called .pt")]
CELLS += [(kind, way) for kind in (*IN_ALL_WAYS, "shards", "index") for way in [*NAMES][1:]]
CELLS += [(kind, way) for kind in IN_ALL_WAYS for way in STREAMS]


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture(params=CELLS, ids=" by ".join)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    kind, way = request.param
    source = {**NAMES, **STREAMS}[way](KINDS[kind](new_folder(tmp_path, "in")))
    position = source.tell() if way in STREAMS else None
    yield source
    if way in STREAMS:
        assert source.closed is False  # it is the caller's
        if request.function is not test_open:
            assert source.tell() == position
        source.close()


# -------------------------------------------------------------------------------------- operations


def assert_same(found: Any, expected: State = STATE) -> None:
    assert {*found} == {*expected}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_open(opened: Any) -> None:
    with ptsave.open(opened) as archive:
        assert_same(archive.tensors())
        assert archive.get_slice("layer.weight")[2:4, 1].tolist() == [17, 25]
        assert {info.name: info.shape for info in archive.infos()} == {
            name: tensor.shape for name, tensor in STATE.items()
        }


def test_list(opened: Any, tmp_path: Path) -> None:
    found, expected = list_file(opened), list_file(write_pt(tmp_path, "plain"))
    tensors = {node.name: node.tensor for node in found.tree.nodes if node.tensor >= 0}
    assert {name: found.facts[number][:2] for name, number in tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in STATE.items()
    }
    assert found.totals.n_tensors == expected.totals.n_tensors
    assert found.totals.tensor_nbytes == expected.totals.tensor_nbytes


def test_verify(opened: Any) -> None:
    found = verify_file(opened)
    assert not found.problems
    assert found.tensors is not None
    assert found.whole is not None
    assert {*found.tensors} == {*found.whole} == {*STATE}


def test_globals(opened: Any, tmp_path: Path) -> None:
    found = required_globals(opened)
    assert {*found} <= {*required_globals(write_pt(tmp_path, "plain"))}
    assert unsafe_globals(found) == []


def test_extract(opened: Any) -> None:
    assert_same(read_entries(opened, [*STATE]))


@pytest.mark.parametrize("target", ["out.safetensors", "out.pt"])
def test_convert(opened: Any, tmp_path: Path, target: str) -> None:
    ptsave.convert(opened, tmp_path / target)
    load = load_file if target.endswith(".safetensors") else torch.load
    assert_same(load(tmp_path / target))


def test_compare(opened: Any, tmp_path: Path) -> None:
    plain = write_pt(tmp_path, "plain")
    assert ptsave.compare(opened, plain).equal
    torch.save({**STATE, "norm": torch.zeros(3, dtype=torch.bfloat16)}, plain)
    (found,) = ptsave.compare(plain, opened).differences
    assert found.name == "norm"


def test_compact(opened: Any, tmp_path: Path) -> None:
    done = ptsave.compact(opened, tmp_path / "out")
    assert done.is_written
    assert done.n_tensors == len(STATE)
    with ptsave.open(tmp_path / "out") as archive:
        assert_same(archive.tensors())


# ------------------------------------------------------------------------------------------ damage


def flip_weight(path: Path) -> None:
    """Change a byte of a tensor."""
    flip(path, STATE["layer.weight"].numpy().tobytes())


def cut(path: Path) -> None:
    """Leave out the end."""
    os.truncate(path, path.stat().st_size - 150)


def holder_of(name: str, path: Path) -> Path:
    """Return the file of a checkpoint that a tensor is in."""
    payload = STATE[name].numpy().tobytes()
    files = [path] if path.is_file() and "index" not in path.name else [*path.parent.rglob("*.*")]
    return next(each for each in files if each.is_file() and payload in each.read_bytes())


READERS: dict[str, Callable[[Any, Path], object]] = {
    "open": lambda f, folder: {**ptsave.open(f).tensors()},
    "extract": lambda f, folder: read_entries(f, ["layer.weight"]),
    "convert": lambda f, folder: ptsave.convert(f, folder / "out.safetensors"),
    "compare": lambda f, folder: ptsave.compare(f, write_pt(folder, "plain")),
    "compact": lambda f, folder: ptsave.compact(f, folder / "out"),
}
DAMAGED_FILES = [
    ("pt", flip_weight),
    ("pt called .safetensors", flip_weight),
    ("pt", cut),
    ("pt called .safetensors", cut),
    ("legacy", cut),
    ("legacy called .safetensors", cut),
    ("safetensors", cut),
    ("safetensors called .pt", cut),
]
DAMAGED_SETS = [
    ("pickled shards", flip_weight),
    ("pickled shards", cut),
    ("shards", cut),
    ("index", cut),
]
DAMAGED_CELLS = [(kind, "str", damage) for kind, damage in DAMAGED_FILES + DAMAGED_SETS]
DAMAGED_CELLS += [
    (kind, way, damage)
    for kind, damage in DAMAGED_FILES + DAMAGED_SETS
    for way in [*NAMES, *STREAMS][1:]
    if kind in IN_ALL_WAYS or (kind in SETS and way in NAMES)
]


@pytest.mark.parametrize(("kind", "way", "damage"), DAMAGED_CELLS)
def test_damage(tmp_path: Path, kind: str, way: str, damage: Callable[[Path], None]) -> None:
    path = KINDS[kind](new_folder(tmp_path, "in"))
    damaged = holder_of("layer.weight", path)
    damage(damaged)
    source = (NAMES | STREAMS)[way](path)
    position = source.tell() if way in STREAMS else 0
    name = damaged.name if kind in SETS else describe(source)
    for reader in READERS.values():
        with pytest.raises(ptsave.CorruptCheckpointError) as caught:
            reader(source, tmp_path)
        assert name in str(caught.value)
        if way in STREAMS:
            source.seek(position)
    found = verify_file(source)
    assert found.problems
    if damage is flip_weight:
        assert {*(found.whole or [])} == STATE.keys() - {"layer.weight"}
    del caught  # whose traceback holds the buffer of a BytesIO, compare's in a cycle
    gc.collect()
    if way in STREAMS:
        source.close()
    assert not (tmp_path / "out.safetensors").exists()


# ------------------------------------------------------------------------------------- directories


OPERATIONS: dict[str, Callable[[Any, Path], object]] = {
    **READERS,
    "list": lambda f, folder: list_file(f),
    "globals": lambda f, folder: required_globals(f),
}


@pytest.mark.parametrize("operation", [*OPERATIONS, "verify"])
@pytest.mark.parametrize("way", NAMES)
def test_empty_directory(tmp_path: Path, operation: str, way: str) -> None:
    (new_folder(tmp_path, "model") / "config.json").write_text("{}")
    source = NAMES[way](tmp_path / "model")
    operations: dict[str, Callable[[Any, Path], object]] = dict(OPERATIONS)
    operations["verify"] = lambda f, folder: verify_file(f)
    with pytest.raises(FileNotFoundError, match="checkpoint") as caught:
        operations[operation](source, tmp_path)
    assert caught.value.filename == str(source)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("way", NAMES)
def test_directory_with_two_checkpoints(tmp_path: Path, operation: str, way: str) -> None:
    """Neither has a name that tells which one is the model; verify checks both."""
    write_pt(new_folder(tmp_path, "model"), "a.ckpt")
    write_safetensors(tmp_path / "model", "b.bin")
    source = NAMES[way](tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds several checkpoints: a\.ckpt, b\.bin; pass"):
        OPERATIONS[operation](source, tmp_path)
    assert len(verify_directory(source).files) == 2


@pytest.mark.parametrize("way", NAMES)
def test_preferred_format_of_a_directory(tmp_path: Path, way: str) -> None:
    write_safetensors(new_folder(tmp_path, "model"), "model.safetensors")
    torch.save({"state": {}}, tmp_path / "model" / "optimizer.pt")
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")
    source = NAMES[way](tmp_path / "model")
    for kept in (ptsave.open(source).tensors(), read_entries(source, [*STATE])):
        assert_same(kept)


@pytest.mark.parametrize("way", NAMES)
def test_distributed_checkpoint(tmp_path: Path, way: str) -> None:
    (new_folder(tmp_path, "model") / ".metadata").touch()
    for operation in OPERATIONS.values():
        with pytest.raises(IsADirectoryError, match=r"torch\.distributed\.checkpoint"):
            operation(NAMES[way](tmp_path / "model"), tmp_path)


@pytest.mark.parametrize("way", NAMES)
def test_missing_shard(tmp_path: Path, way: str) -> None:
    model = write_shards(tmp_path)
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.unlink()
    source = NAMES[way](model)
    for operation in OPERATIONS.values():
        with pytest.raises(FileNotFoundError) as caught:
            operation(source, tmp_path)
        assert shard.name in f"{caught.value} {caught.value.filename}"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("way", ["BytesIO", "subclass of BytesIO", "open file", "fsspec file"])
def test_index_in_a_file_object(tmp_path: Path, operation: str, way: str) -> None:
    source = STREAMS[way](write_index(tmp_path))
    with pytest.raises(ptsave.UnsupportedSourceError, match="pass the path or the URL of"):
        OPERATIONS[operation](source, tmp_path)
    source.close()


def test_json_that_is_no_index(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content in ("{}", '{"weight_map": {}}', '{"weight_map": 3}', "[]"):
        path.write_text(content)
        with pytest.raises(ptsave.NotCheckpointError, match="it is text"):
            ptsave.open(path)


# ------------------------------------------------------------------------------ compacting in place


def write_wasteful(folder: Path, name: str) -> Path:
    torch.save({name: torch.arange(10_000.0)[:8]}, folder / name)
    return folder / name


@pytest.mark.parametrize("way", ["str", "Path"])
def test_compact_in_place(tmp_path: Path, way: str) -> None:
    model = new_folder(tmp_path, "model")
    for name in ("model-1-of-2.pt", "model-2-of-2.pt"):
        write_wasteful(model, name)
    before = ptsave.compact(NAMES[way](model), dry_run=True)
    assert not before.is_written
    assert before.n_storages == 2
    done = ptsave.compact(NAMES[way](model))
    assert done.is_written
    assert done.nbytes == before.nbytes == sum(path.stat().st_size for path in model.iterdir())
    assert done.nbytes < 10_000
    with ptsave.open(model) as archive:
        assert [tensor.tolist() for tensor in archive.tensors().values()] == [[*range(8)]] * 2


def test_compact_to_a_directory(tmp_path: Path) -> None:
    model = write_shards(tmp_path, format="pt")
    done = ptsave.compact(model, tmp_path / "small")
    assert done.path == str(tmp_path / "small")
    assert sorted(os.listdir(tmp_path / "small")) == sorted(os.listdir(model))
    with ptsave.open(tmp_path / "small") as archive:
        assert_same(archive.tensors())
    with pytest.raises(FileExistsError, match="--force"):
        ptsave.compact(model, tmp_path / "small")
    ptsave.compact(model, tmp_path / "small", force=True)
    with pytest.raises(FileExistsError, match="source itself"):
        ptsave.compact(model, model, force=True)


def test_compact_in_place_what_has_no_place(tmp_path: Path) -> None:
    path = write_pt(tmp_path, "model.pt")
    for way, make in STREAMS.items():
        stream = make(path)
        with pytest.raises(ptsave.UnsupportedSourceError, match="pass a target"):
            ptsave.compact(stream)
        assert not ptsave.compact(stream, dry_run=True).is_written, way
        stream.close()


# ---------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("kind", "way"), [cell for cell in CELLS if cell[1] in ("str", "memory URL")]
)
def test_commands(tmp_path: Path, kind: str, way: str) -> None:
    source = NAMES[way](KINDS[kind](new_folder(tmp_path, "in")))
    plain = write_pt(tmp_path, "plain")
    for arguments in (
        ["ls", source],
        ["ls", source, "--json"],
        ["verify", source],
        ["globals", source],
        ["show", source],
        ["show", source, "norm", "--json"],
        ["extract", source, "norm", "-o", tmp_path / "norm.pt"],
        ["convert", source, tmp_path / "out.safetensors"],
        ["diff", source, plain],
        ["compact", source, "-o", tmp_path / "out"],
        ["compact", source, "--dry-run"],
    ):
        succeed(*arguments)
    assert torch.equal(torch.load(tmp_path / "norm.pt"), STATE["norm"])
    assert_same(load_file(tmp_path / "out.safetensors"))


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    names = [str(write_pt(tmp_path, f"{i}.pt")) for i in range(60)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        succeed("verify", *names)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_verify_shards_in_subdirectories(tmp_path: Path) -> None:
    write_pt(new_folder(tmp_path, "parts"), "a.pt")
    index = tmp_path / "model.pt.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(STATE, "parts/a.pt")}))
    for source in (tmp_path, index):
        found = verify_directory(source)
        assert [file.path for file in found.files] == [str(tmp_path / "parts" / "a.pt")]
        assert not found.is_damaged
        ptsave.compact(source, tmp_path / f"of {Path(source).name}")
    assert os.listdir(tmp_path / f"of {index.name}" / "parts") == ["a.pt"]


def test_shards_with_more_than_tensors(tmp_path: Path) -> None:
    """What shares a storage within a shard does so afterwards, too."""
    weight = torch.arange(4.0)
    model = new_folder(tmp_path, "model")
    parameter = torch.nn.Parameter(weight)
    nested = {"views": [weight[1:], weight[:2]], "step": 7, "storage": torch.UntypedStorage(16)}
    torch.save(nested, model / "model-1-of-2.pt")
    torch.save({"sparse": weight.to_sparse(), "parameter": parameter}, model / "model-2-of-2.pt")
    with ptsave.open(model) as archive:
        first, second = archive["views"]
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        assert (first.tolist(), second.tolist(), archive["step"]) == ([1, 2, 3], [0, 1], 7)
        assert len(archive["storage"]._untyped_storage) == 16
        assert archive["sparse"].to_dense().tolist() == [0, 1, 2, 3]
        assert type(archive["parameter"]) is torch.nn.Parameter
        assert archive["parameter"].tolist() == [0, 1, 2, 3]
    lists = new_folder(tmp_path, "list")
    for name in ("model-1-of-2.pt", "model-2-of-2.pt"):
        torch.save([weight], lists / name)
    with pytest.raises(TypeError, match="holds list, not a dict"):
        ptsave.open(lists)


def test_one_name_in_two_shards(tmp_path: Path) -> None:
    write_pt(tmp_path, "model-1-of-2.pt")
    write_pt(tmp_path, "model-2-of-2.pt")
    for operation in ("open", "extract", "convert", "compare"):
        with pytest.raises(ValueError, match="no index says which"):
            READERS[operation](tmp_path, tmp_path)
