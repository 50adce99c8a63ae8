"""Files that have lost their end: what is there is listed, extracted and converted, and right."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from command_line import run
from safetensors.torch import load_file, save
from stock_comparison import assert_same_object, saved_bytes

import ptsave
from ptsave import _C
from ptsave.archive.recovery import CutArchive
from ptsave.archive.surviving import SavedEntries
from ptsave.inspection.verification import verify_file
from ptsave.sources.ranges import Buffer

CheckpointWarning = ptsave.CheckpointWarning


def checkpoint() -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(7, 5) for _ in range(6))).state_dict()
    assert getattr(model, "_metadata")  # noqa: B009 - mypy does not know it
    return {
        "epoch": 3,
        "model": model,
        "optimizer": {"state": {0: {"step": torch.ones(()), "exp_avg": torch.rand(99)}}, "lr": 0.1},
        "several": [torch.arange(9), "words"],
        "tied": model["0.weight"],
    }


def cut(content: bytes) -> ptsave.Archive:
    return ptsave.open(io.BytesIO(content), recover=True)


def assert_part_of(part: Any, whole: Any) -> None:
    """Dicts may lack items; what is there is what was saved."""
    assert type(part) is type(whole)
    if not isinstance(whole, (dict, OrderedDict)):
        assert_same_object(part, whole)
        return
    assert list(part) == [key for key in whole if key in part]
    assert getattr(part, "_metadata", None) == getattr(whole, "_metadata", None)
    for key, value in part.items():
        assert_part_of(value, whole[key])


def in_order_of_text(content: bytes) -> bytes:
    """Write the records as older versions of torch do: data/10 comes before data/2."""
    reader = torch._C.PyTorchFileReader(io.BytesIO(content))
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    names = [n for n in reader.get_all_records() if not n.startswith((".", "version"))]
    storages = sorted(name for name in names if name.startswith("data/"))
    for name in [*(n for n in names if n not in storages), *storages]:
        record = reader.get_record(name)
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return stream.getvalue()


@pytest.fixture(params=["numbers", "text"])
def order(request: pytest.FixtureRequest) -> Any:
    return in_order_of_text if request.param == "text" else bytes


def test_only_the_directory_is_missing(order: Any) -> None:
    obj = checkpoint()
    content = order(saved_bytes(torch.save, obj))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cut(content[:-30]) as archive:
            assert_part_of({key: archive[key] for key in obj}, obj)
            archive.verify()


def test_every_cut(order: Any) -> None:
    """At every length, what can be read is a part of what was saved, and more of a longer file."""
    obj = checkpoint()
    content = order(saved_bytes(torch.save, obj))
    n_before = 0
    for nbytes in sorted({*range(30, len(content), 149), len(content) - 1}):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                archive = cut(content[:nbytes])
        except ptsave.CorruptCheckpointError as error:
            assert "nothing can be recovered" in str(error)  # noqa: PT017 - of short ones
            assert n_before == 0
            continue
        with archive:
            part = {key: archive[key] for key in obj if key in archive}
            assert_part_of(part, obj)
            assert len(archive.tensors()) >= n_before
            n_before = len(archive.tensors())
            archive.verify()
    assert n_before == 16


def test_a_changed_byte_of_a_cut_file(order: Any) -> None:
    """It takes one storage along, or all if it is the pickle's; nothing that is read is wrong."""
    obj = checkpoint()
    content = order(saved_bytes(torch.save, obj))
    cut_off = content[: content.index(b"PK\1\2")]  # the directory, which is cut off
    storages = [each for each in CutArchive(Buffer(io.BytesIO(content), "")).records
                if each.name.startswith("data/")]  # fmt: skip
    for number, record in enumerate(storages):
        for offset in {*range(record.header_offset, record.end, 17), record.payload_offset - 1,
                       *range(record.header_offset + 30, record.header_offset + 50)}:  # fmt: skip
            damaged = bytearray(cut_off)
            damaged[offset] ^= (0x01, 0x02, 0xFF)[(offset - record.header_offset + number) % 3]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                archive = cut(bytes(damaged))
            with archive:
                assert_part_of({key: archive[key] for key in obj if key in archive}, obj)
                assert len(archive.tensors()) >= 14, (record, offset)  # one may be tied, or two
                archive.verify()


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    content = saved_bytes(
        torch.save, {"a": torch.ones(99), "in": {"b": torch.ones(99), "c": torch.ones(99)}, "d": 1}
    )
    path.write_bytes(content[: content.index(b"data/2") + 200])
    words = "missing: data/2; without the entries in.c$"
    with pytest.warns(CheckpointWarning, match=words), ptsave.open(path, recover=True) as archive:
        assert list(archive) == ["a", "in.b"]
    path.write_bytes(content[: content.index(b"data/1") + 200])
    with (
        pytest.warns(CheckpointWarning, match=r"missing: data/1, data/2; .* in\.b, in\.c$"),
        ptsave.open(path, recover=True) as archive,
    ):
        assert list(archive) == ["a"]
    path.write_bytes(content[: content.index(b"data/0")])
    with pytest.warns(CheckpointWarning), ptsave.open(path, recover=True) as archive:
        assert archive["d"] == 1
    path.write_bytes(content[:200])
    with pytest.raises(ptsave.CorruptCheckpointError, match="nor a journal is undamaged"):
        ptsave.open(path, recover=True)


@pytest.mark.parametrize("obj", [[torch.ones(99)], torch.ones(99), {"a": torch.ones(99)}])
def test_nothing_is_left(obj: Any) -> None:
    content = saved_bytes(torch.save, obj)
    with pytest.raises(ptsave.CorruptCheckpointError, match=r"not a dict|nothing can be recovered"):
        cut(content[: content.index(b"data/0") + 100])
    with cut(content[:-30]) as archive:  # all is there
        assert_same_object(archive.load() if hasattr(archive, "load") else obj, obj)


def test_another_byte_order(tmp_path: Path) -> None:
    content = saved_bytes(torch.save, {"a": torch.ones(9)})
    old, new = (_C.crc32(order).to_bytes(4, "little") for order in (b"little", b"bigend"))
    with pytest.raises(ptsave.CorruptCheckpointError, match="byte order"):
        cut(content.replace(b"little", b"bigend").replace(old, new)[:-30])


def test_a_file_around_an_archive() -> None:
    """Its archive is not taken for the file."""
    content = saved_bytes(torch.save, {"a": torch.ones(9)})
    with pytest.raises(ptsave.NotCheckpointError):
        cut(bytes(512) + content[:-30])


def test_deep_dicts_and_shared_ones() -> None:
    shared = {"gone": torch.ones(99), "kept": 1}
    deep: Any = {"x": 1, "gone": torch.ones(99)}
    for _ in range(300):
        deep = {"in": deep, "n": 1}
    content = saved_bytes(
        torch.save, {"first": torch.zeros(9), "a": shared, "b": shared, "deep": deep}
    )
    with pytest.warns(CheckpointWarning):
        archive = cut(content[: content.index(b"data/1") + 90])
    assert archive["a"] == archive["b"] == {"kept": 1}
    inner = archive["deep"]
    for _ in range(300):
        inner = inner["in"]
    assert inner == {"x": 1}


@pytest.fixture(params=["c.pt", "c.safetensors"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tensors = {f"t{i}": torch.full((99,), i) for i in range(5)}
    path: Path = tmp_path / request.param
    content = (
        saved_bytes(torch.save, tensors)
        if path.suffix == ".pt"
        else save(tensors, {"format": "pt"})
    )
    at = content.index(torch.full((9,), 3).numpy().tobytes())
    path.write_bytes(content[: at + 99])
    return path


@pytest.mark.filterwarnings("default::ptsave.errors.CheckpointWarning")
def test_commands(damaged: Path, tmp_path: Path) -> None:
    kept = {f"t{i}": torch.full((99,), i) for i in range(3)}
    path, new = str(damaged), str(tmp_path / "new.safetensors")
    for words in (["ls"], ["extract", "t1"], ["convert", new]):
        refused = run(words[0], path, *words[1:])
        assert (refused.exit_code, "--recover" in refused.output) == (2, True)
    listed = run("ls", path, "--recover", "--json")
    assert [each["name"] for each in json.loads(listed.stdout)["tensors"]] == list(kept)
    assert "without the entries t3, t4" in listed.stderr
    assert run("convert", path, new, "--recover").exit_code == 0
    assert_same_object(load_file(new), kept)
    rest = run("extract", path, "--whole", "-o", str(tmp_path / "rest.pt"), "--json")
    assert json.loads(rest.stdout)["left_out"] == ["t3", "t4"]
    assert_same_object(torch.load(tmp_path / "rest.pt"), kept)
    for option in ([], ["--recover"]):
        found = run("verify", path, *option)
        assert found.exit_code == 1
        assert "damaged: t3" in found.stdout


@pytest.mark.filterwarnings("default::ptsave.errors.CheckpointWarning")
def test_convert_to_itself(damaged: Path) -> None:
    content = damaged.read_bytes()
    for option in ([], ["--force"]):
        refused = run("convert", str(damaged), str(damaged), "--recover", *option)
        assert (refused.exit_code, "the source itself" in refused.output) == (2, True)
    assert damaged.read_bytes() == content


@pytest.mark.filterwarnings("default::ptsave.errors.CheckpointWarning")
def test_elsewhere_and_with_another_name(damaged: Path, tmp_path: Path) -> None:
    """The content decides, and a URL is read as a file is."""
    other = damaged.with_suffix(".safetensors" if damaged.suffix == ".pt" else ".bin")
    damaged.rename(other)
    url = f"memory://{other.name}"
    fsspec.filesystem("memory").pipe(f"/{other.name}", other.read_bytes())
    for place in (str(other), url):
        with pytest.raises(ptsave.CorruptCheckpointError, match="recover=True"):
            ptsave.open(place)
        assert "without the entries t3, t4" in run("ls", place, "--recover").output
        words = ["extract", place, "t1", "-o", str(tmp_path / "t1.pt"), "--recover", "-f"]
        assert run(*words).exit_code == 0
        assert torch.load(tmp_path / "t1.pt").tolist() == [1] * 99
        new = str(tmp_path / "new.pt")
        assert run("convert", place, new, "--recover", "--force").exit_code == 0
        assert [*torch.load(new)] == ["t0", "t1", "t2"]


@pytest.mark.filterwarnings("default::ptsave.errors.CheckpointWarning")
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_a_set_of_shards(tmp_path: Path, suffix: str) -> None:
    """Entries that a cut shard has lost are left out of the set, and named."""
    stem = "pytorch_model" if suffix == ".bin" else "model"
    shards = [
        {"a": torch.ones(300), "b": torch.arange(9.0)},
        {"c": torch.arange(500.0), "d": torch.ones(800)},
    ]
    weight_map = {}
    for number, tensors in enumerate(shards):
        path = tmp_path / f"{stem}-0000{number + 1}-of-00002{suffix}"
        path.write_bytes(saved_bytes(torch.save, tensors) if suffix == ".bin" else save(tensors))
        weight_map.update(dict.fromkeys(tensors, path.name))
    (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    path.write_bytes(path.read_bytes()[:-2500])
    kept = {name: tensor for each in shards for name, tensor in each.items() if name != "d"}
    folder, new = str(tmp_path), str(tmp_path / "new.pt")
    assert run("convert", folder, new).exit_code == 2
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.open(folder)
    converted = run("convert", folder, new, "--recover")
    assert (converted.exit_code, "the shards have lost d" in converted.stderr) == (0, True)
    assert_same_object(torch.load(new), kept)
    rest = run("extract", folder, "--whole", "-o", new, "--force", "--json")
    assert json.loads(rest.stdout)["left_out"] == ["d"]
    assert_same_object(torch.load(new), kept)
    assert run("extract", folder, "c", "--recover", "-o", new, "--force").exit_code == 0
    assert_same_object(torch.load(new), kept["c"])
    with pytest.warns(CheckpointWarning), ptsave.open(folder, recover=True) as archive:
        assert sorted(map(str, archive)) == [*kept]
    for n_left in (200, 9, 0):  # nothing of the shard
        path.write_bytes(path.read_bytes()[:n_left])
        with pytest.warns(CheckpointWarning), ptsave.open(folder, recover=True) as archive:
            assert sorted(map(str, archive)) == ["a", "b"]


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_tensors_of_no_bytes(kind: str) -> None:
    """They are there, wherever the file ends."""
    tensors = {f"e{i}": torch.empty(0, i) for i in range(3)}
    tensors.update(a=torch.ones(99), e3=torch.empty(4, 0), b=torch.ones(98), e4=torch.empty(0))
    content = saved_bytes(torch.save, tensors) if kind == "pt" else save(tensors)
    begin = content.index(b"data/3") + 600 if kind == "pt" else len(content) - 300
    for nbytes in range(begin, begin + 250, 50):
        with pytest.warns(CheckpointWarning, match="without the entries b"):
            archive = cut(content[:nbytes])
        with archive:
            found = {str(name): archive[name] for name in archive}
            if kind == "pt":
                archive.verify()
        assert_same_object(found, {name: tensors[name] for name in found})
        assert tensors.keys() - found == {"b"}


def test_verified(damaged: Path) -> None:
    found = verify_file(damaged, recover=True)
    assert found.whole == ["t0", "t1", "t2"]
    assert found.problems[0].entries == ["t3", "t4"]
    assert found.is_unfinished


def test_every_cut_of_safetensors() -> None:
    tensors = {
        "ü": torch.rand(3, 4),
        "b": torch.arange(9),
        "empty": torch.empty(0, 3),
        "c": torch.ones(()),
    }
    content = save(tensors, {"author": "é"})
    n_before = 0
    for nbytes in range(8, len(content)):
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                archive = cut(content[:nbytes])
            assert "without the entries" in str(warned[0].message)
        except (ptsave.CorruptCheckpointError, ptsave.NotCheckpointError):
            assert n_before == 0
            continue
        with archive:
            assert archive.metadata["author"] == "é"
            for name in archive:
                assert_same_object(archive[name], tensors[str(name)])
            assert len(archive.tensors()) >= n_before
            n_before = len(archive.tensors())
    assert n_before == len(tensors) - 1
    with cut(content) as archive:
        assert len(archive.tensors()) == len(tensors)


def test_safetensors_that_are_damaged_otherwise() -> None:
    content = save({"a": torch.ones(9), "b": torch.ones(9)})
    for bad in (content + b"more", content.replace(b"[0,36]", b"[4,36]")):
        with pytest.raises(ptsave.CorruptCheckpointError, match="is damaged or incomplete"):
            cut(bad)


@pytest.mark.filterwarnings("ignore::ptsave.errors.CheckpointWarning")
@pytest.mark.parametrize("first", [True, False])
def test_the_bytes_of_an_archive_in_a_tensor(first: bool) -> None:
    """Records of an archive that is the content of a tensor are not those of the file."""
    layers = {f"l{i}": torch.full((100,), 1.0 + i) for i in range(12)}
    inner = {f"l{i}": torch.full((100,), 1000.0 + i) for i in range(12)}
    blob = torch.frombuffer(bytearray(saved_bytes(torch.save, inner)), dtype=torch.uint8).clone()
    obj = {"blob": blob, **layers} if first else {**layers, "blob": blob}
    obj = {"zero": torch.zeros(3), **obj}
    content = saved_bytes(torch.save, obj)
    for nbytes in range(content.index(b"data/0"), len(content), 61):
        try:
            archive = cut(content[:nbytes])
        except ptsave.CorruptCheckpointError:
            continue
        with archive:
            for name in archive:
                assert_same_object(archive[name], obj[str(name)])


def test_a_dict_in_a_list_that_is_open_elsewhere() -> None:
    """It would change in the list, so all that holds it is left out."""
    shared = {"x": torch.ones(99)}
    content = saved_bytes(
        torch.save, {"kept": torch.zeros(3), "d": shared, "l": [shared, 1], "n": 1}
    )
    with pytest.warns(CheckpointWarning, match="without the entries d, l$"):
        archive = cut(content[: content.index(b"data/1") + 200])
    assert archive._contents.obj.keys() == {"kept", "n"}


def test_keys_that_take_for_ever_to_hash() -> None:
    """A tuple that is in another one twice, and that in the next."""
    body = b"K\1\x85q\0"
    for i in range(60):
        body += bytes([0x68, i, 0x68, i, 0x86, 0x71, i + 1])
    with pytest.raises(ValueError, match="keys take too long to hash"):
        SavedEntries(b"\x80\x02}" + body + b"K\1s.")


def test_error_of_the_engine_is_pickled_with_its_attributes(tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    path.write_bytes(saved_bytes(torch.save, checkpoint())[:-50])
    with pytest.raises(ptsave.CorruptCheckpointError, match="internal miniz error") as raised:
        ptsave.open(path)
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is ptsave.CorruptCheckpointError
    assert (str(again), vars(again)) == (str(raised.value), vars(raised.value))
    assert (again.path, again.lacks_end) == (str(path), True)
    assert "miniz" not in again.brief
    assert "a command with --recover" in again.brief
