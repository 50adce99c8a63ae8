"""URLs where only local paths are served, or that cannot be written to: one error, nothing made."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import fsspec
import pytest
import torch
from command_line import run
from fsspec.registry import known_implementations
from stock_comparison import assert_same_object, stock_load, stock_save
from torch import nn

import ptsave
from ptsave.bench.rounds import plan_disk
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.inspection.extraction import write_entries

URLS = [
    "s3://bucket/run/model.pt",
    "S3://bucket/model.pt",
    "gs://bucket/model.pt",
    "hf://user/model/model.bin",
    "http://localhost:1/model.pt",
    "https://localhost:1/model.pt",
    "file:///nowhere/model.pt",
    "memory://model.pt",
    "abfs+x.y-z://model.pt",
    "zip://model.pt::s3://bucket/all.zip",
    "simplecache::s3://bucket/model.pt",
    "s3://bucket/directory/",
    "s3://bucket",
    "s3://",
]


# fsspec does not write to these, or not all at once, or does not know them.
UNWRITABLE_URLS = {
    "http://localhost:1/model.pt": "web servers",
    "https://localhost:1/model.pt": "web servers",
    "zip://model.pt::s3://bucket/all.zip": "chains of URLs",
    "simplecache::memory://bucket/model.pt": "chains of URLs",
    "zip:///model.pt": "in archives",
    "hf://user/model/model.pt": "huggingface_hub",
    "S3://bucket/model.pt": "Protocol not known",
    "abfs+x.y-z://model.pt": "Protocol not known",
    "oci://bucket/model.pt": "pip install|[Ii]nstall",
}


class OtherPath(os.PathLike[Any]):
    """A path of a class of somebody's own."""

    def __init__(self, path: str | bytes) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


STATE = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}


def bench(f: Any) -> object:
    """Do what refuses all URLs."""
    return plan_disk(f, 32 << 20)


# These write to URLs.
SERVED: dict[str, Callable[[Any], object]] = {
    "save": lambda f: ptsave.save(STATE, f),
    "save, old format": lambda f: ptsave.save(1, f, _use_new_zipfile_serialization=False),
    "save in place": lambda f: ptsave.save(STATE, f, atomic=False),
    "async_save": lambda f: ptsave.async_save(STATE, f),
    "save_checkpoint": lambda f: ptsave.save_checkpoint(f, model=nn.Linear(2, 2)),
    "AsyncCheckpointer": ptsave.AsyncCheckpointer,
    "save_model": lambda f: ptsave.save_model(nn.Linear(2, 2), f),
    "save_model, pt": lambda f: ptsave.save_model(STATE, f, format="pt"),
    "convert to": lambda f: convert("../local.pt", f),
    "compact to": lambda f: compact("../local.pt", f),
    "compact in place": compact,
    "write_entries": lambda f: write_entries({"a": torch.ones(2)}, f),
}
LOADS: dict[str, Callable[..., object]] = {
    **doors.LOADS,
    "load, mmap": lambda f: ptsave.load(f, mmap=True),
    "load, map_location": lambda f: ptsave.load(f, map_location="cpu"),
    "load_into, assign": lambda f: ptsave.load_into(f, nn.Linear(2, 2), assign=True),
}
# These read URLs, but not what pathlib makes of one.
READS = doors.INSPECTIONS
ALL: dict[str, Callable[[Any], object]] = {**SERVED, **LOADS, "bench": bench}
TYPES_OF_BYTES = ["save_model", "AsyncCheckpointer", "load_model"]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_save(STATE, tmp_path / "local.pt")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def check_refused(call: Callable[[Any], object], path: Any, named: str) -> None:
    with pytest.raises(ptsave.UnsupportedUrlError) as caught:
        call(path)
    error = caught.value
    assert error.filename == named
    assert isinstance(error, (OSError, RuntimeError))
    message = str(error.strerror)
    assert message.startswith("URLs are not accepted here, only local files and directories")
    assert "copy the file to or from a local path" in message
    assert os.listdir() == []


@pytest.mark.parametrize("url", URLS)
def test_urls_are_refused(url: str) -> None:
    check_refused(bench, url, url)
    found = run("bench", url)
    assert found.exit_code == 2
    assert found.stderr.startswith(f"ptsave: {url}: URLs are not accepted here, only local files")
    assert os.listdir() == []


@pytest.mark.parametrize("operation", SERVED)
@pytest.mark.parametrize("url", UNWRITABLE_URLS)
def test_urls_that_cannot_be_written(operation: str, url: str) -> None:
    with pytest.raises(ptsave.UnsupportedUrlError) as caught:
        SERVED[operation](url)
    assert caught.value.filename == url
    message = str(caught.value.strerror)
    assert message.startswith("nothing can be written to this URL (")
    assert re.search(UNWRITABLE_URLS[url], message)
    assert "save to a local path" in message
    assert os.listdir() == []


@pytest.mark.parametrize("operation", [*ALL, *READS])
def test_what_pathlib_makes_of_a_url_is_refused(operation: str) -> None:
    for url in URLS[:-1]:
        path = Path(url)
        check_refused({**ALL, **READS}[operation], path, str(path))
        normal = os.path.normpath(url)
        check_refused({**ALL, **READS}[operation], normal, normal)


@pytest.mark.parametrize("operation", ALL)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_paths_of_other_types_are_refused(operation: str, as_bytes: bool) -> None:
    url = URLS[0]
    if as_bytes and operation not in TYPES_OF_BYTES:
        return  # no path, as for torch
    path = OtherPath(os.fsencode(url) if as_bytes else url)
    check_refused(ALL[operation], path, url)
    if as_bytes:
        check_refused(ALL[operation], os.fsencode(url), url)


@pytest.mark.parametrize("url", UNWRITABLE_URLS)
def test_errors_are_caught_as_those_of_torch(url: str) -> None:
    check_as_torchs(lambda f: ptsave.save([1], f), lambda f: stock_save([1], f), url)
    with ptsave.installed(), pytest.raises(ptsave.UnsupportedUrlError):
        torch.save([1], url)


def check_as_torchs(ours: Callable[[str], Any], stock: Callable[[str], Any], url: str) -> None:
    with pytest.raises((OSError, RuntimeError)) as expected:
        stock(url)
    with pytest.raises(type(expected.value)) as caught:
        ours(url)
    assert isinstance(caught.value, ptsave.SaveError)
    assert isinstance(caught.value, FileNotFoundError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


@pytest.fixture
def _file_system_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "no_such_package.FileSystem", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "missing", known)


@pytest.mark.usefixtures("_file_system_that_is_not_installed")
@pytest.mark.parametrize("url", ["nothing://bucket/model.pt", "missing://bucket/model.pt"])
@pytest.mark.parametrize("operation", LOADS)
def test_urls_that_fsspec_cannot_read(operation: str, url: str) -> None:
    check_as_torchs(LOADS[operation], stock_load, url)
    with pytest.raises(ptsave.UnsupportedUrlError, match="local path") as caught:
        LOADS[operation](url)
    assert caught.value.filename == url
    assert ("Install no_such_package" in str(caught.value)) == url.startswith("missing")


@pytest.mark.parametrize("url", ["file:///nowhere/model.pt", "memory://nowhere/model.pt"])
@pytest.mark.parametrize("operation", LOADS)
def test_urls_of_files_that_are_not_there(operation: str, url: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/model\.pt"):
        LOADS[operation](url)


def test_a_checkpoint_is_left_alone() -> None:
    target = {"weight": torch.zeros(2, 2)}
    model = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(FileNotFoundError):
        ptsave.load_into("memory://nowhere/model.pt", target)
    with pytest.raises(FileNotFoundError):
        ptsave.load_model(model, "memory://nowhere/model")
    assert torch.equal(target["weight"], torch.zeros(2, 2))
    assert_same_object(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    "command",
    [
        ["extract", "../local.pt", "weight", "-o", "URL"],
        ["convert", "../local.pt", "URL"],
        ["compact", "../local.pt", "-o", "URL"],
    ],
    ids=" ".join,
)
def test_commands_that_write_urls(command: list[str]) -> None:
    for url in UNWRITABLE_URLS:
        found = run(*(url if word == "URL" else word for word in command))
        assert found.exit_code == 2
        assert found.stderr.startswith(f"ptsave: {url}: nothing can be written to this URL")
    found = run(*(word.replace("URL", "memory://new/x.pt") for word in command))
    assert found.exit_code == 0
    with fsspec.open("memory://new/x.pt") as stream:
        assert stock_load(stream) is not None
    found = run(*(word.replace("URL", "memory://new/x.pt") for word in command))
    assert "exists already" in found.stderr or "the file exists" in found.stderr
    fsspec.filesystem("memory").rm("/new", recursive=True)
    assert os.listdir() == []


def test_the_picture_of_a_benchmark() -> None:
    pytest.importorskip("matplotlib")
    found = run("bench", "--plot", "s3://bucket/speeds.png")
    assert found.exit_code == 2
    assert os.listdir() == []


@pytest.mark.parametrize("command", ["ls", "verify", "globals"])
def test_commands_that_read_urls(command: str) -> None:
    """They go on reading them, and refuse what pathlib makes of them, and unknown ones."""
    fsspec.filesystem("memory").pipe("/urls/a.pt", Path("../local.pt").read_bytes())
    assert run(command, "memory://urls/a.pt").exit_code == 0
    for url in ("memory:/urls/a.pt", "MEMORY://urls/a.pt", "nothing://urls/a.pt"):
        found = run(command, url)
        assert found.exit_code == 2
        assert found.stderr.startswith(f"ptsave: {url}: URLs are not accepted here, only local")


def test_directories_at_urls_that_are_not_there() -> None:
    for name in ("open", "list_file", "verify_file", "required_globals", "convert", "read_entries"):
        with pytest.raises(FileNotFoundError):
            READS[name]("memory://urls/none")


# ------------------------------------------------------------------- local names that look like it


@pytest.mark.parametrize(
    "name",
    ["a::b.pt", "12:30.pt", "c:", "c:/model.pt", "step:5/model.pt", "./s3://bucket/model.pt",
     "folder/a://b.pt", "1s://x.pt", "-://x.pt"],
)  # fmt: skip
def test_local_names(name: str) -> None:
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    expected = {"weight": torch.ones(2)}
    ptsave.save(expected, name)
    assert_same_object(stock_load(name), expected)
    assert_same_object(ptsave.load(name), expected)
    ptsave.save(expected, Path(name), atomic=False)
    assert_same_object(ptsave.load(Path(name)), expected)
    with ptsave.open(name) as archive:
        assert archive.keys() == ["weight"]
    target = {"weight": torch.zeros(2)}
    ptsave.load_into(name, target)
    assert target["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["exp:/a/model.pt", "no/such/a://b.pt", "run::3.pt"])
def test_local_names_that_are_not_there(name: str) -> None:
    with pytest.raises(FileNotFoundError) as expected:
        stock_load(name)
    with pytest.raises(FileNotFoundError) as caught:
        ptsave.load(name)
    assert caught.value.filename == expected.value.filename == name


def test_a_directory_called_as_a_scheme() -> None:
    """It can be read by any name and written by names that are no URLs."""
    os.makedirs("s3:/bucket")
    model = nn.Linear(2, 2)
    ptsave.save(model.state_dict(), "./s3://bucket/model.pt")
    ptsave.save(model.state_dict(), Path("s3:/bucket/model.pt"))
    url = "s3://bucket/model.pt"
    assert_same_object(ptsave.load(url), stock_load(url))
    ptsave.load_into(url, nn.Linear(2, 2))
    ptsave.load_model(nn.Linear(2, 2), url)
    with ptsave.open(url) as archive:
        assert archive.keys() == ["weight", "bias"]
    with ptsave.AsyncCheckpointer(Path("s3:/bucket/run")) as checkpointer:
        checkpointer.save(1, value=1)
    before = Path(url).read_bytes()
    with pytest.raises(ptsave.UnsupportedUrlError, match="begin the name of a local file with"):
        bench(url)
    assert Path(url).read_bytes() == before
    assert sorted(os.listdir("s3:/bucket")) == ["model.pt", "run"]


@pytest.mark.parametrize("options", ["anon", ["anon"], {1: True}, True])
@pytest.mark.parametrize("url", ["memory://options/model.pt", "file:///no/such/model.pt"])
def test_storage_options_that_are_none(url: str, options: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: ptsave.load(url, storage_options=options),
        lambda: ptsave.open(url, storage_options=options),
        lambda: ptsave.save([1], url, storage_options=options),
        lambda: ptsave.save_model({"a": torch.ones(2)}, url, storage_options=options),
        lambda: convert("local.pt", url, target_storage_options=options),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="storage_options must be a dict"):
            call()
    assert os.listdir() == []


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsspec", "fsspec.core", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    url = "memory://missing/x.pt"
    for call in (
        lambda: ptsave.load(url),
        lambda: ptsave.open(url),
        lambda: ptsave.load_model(torch.nn.Linear(1, 1), url),
        lambda: ptsave.save([1], url),
    ):
        with pytest.raises(ptsave.UnsupportedUrlError, match="pip install fsspec"):
            call()
    with pytest.raises(ImportError, match="progress=True needs tqdm: pip install tqdm"):
        ptsave.save([1], tmp_path / "x.pt", progress=True)
