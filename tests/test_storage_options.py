"""Options for the file system of a URL: all that reads or writes carries them to the end."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import doors
import pytest
import torch
import url_file_systems as file_systems
from command_line import run
from reports import verify_directory
from url_file_systems import TOKEN

import ptsave
from ptsave.cli.commands import complete_names
from ptsave.cli.entries import ls_command as ls
from ptsave.comparison.compare import compare
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.inspection.extraction import write_entries

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
NAMES = ["model.pt", "old.pt", "model.safetensors", "shards", "shards/model.safetensors.index.json"]

READS: dict[str, Callable[..., Any]] = {
    **doors.LOADS,
    "load_checkpoint": ptsave.load_checkpoint,  # a file of no "model"
    **doors.INSPECTIONS,
    "open": lambda f, **options: ptsave.open(f, **options)["weight"],
    "compact": lambda f, **options: compact(f, dry_run=True, **options),
    "verify_directory": verify_directory,
    "compare, a": lambda f, storage_options: compare(
        f, "local.pt", a_storage_options=storage_options
    ),
    "compare, b": lambda f, storage_options: compare(
        "local.pt", f, b_storage_options=storage_options
    ),
}
WRITES: dict[str, Callable[..., Any]] = {
    "save": lambda f, **options: ptsave.save(STATE, f, **options),
    "async_save": lambda f, **options: ptsave.async_save(STATE, f, **options).result(),
    "save_checkpoint": lambda f, **options: ptsave.save_checkpoint(f, a=1, **options),
    "save_model": lambda f, **options: ptsave.save_model(STATE, f, **options),
    "AsyncCheckpointer": lambda f, **options: (
        ptsave.AsyncCheckpointer(f, **options).save(1, a=1).result()
    ),
    "write_entries": lambda f, **options: write_entries(STATE, f, **options),
    "convert to": lambda f, storage_options: convert(
        "local.pt", f, format="pt", target_storage_options=storage_options
    ),
    "compact to": lambda f, storage_options: compact(
        "local.pt", f, target_storage_options=storage_options
    ),
}
TO_STREAMS = ["save", "async_save", "save_checkpoint", "write_entries"]
# The option of each, and its words.
COMMANDS = {
    "ls": ["--storage-options", "ls", "IN"],
    "verify": ["--storage-options", "verify", "-q", "IN"],
    "globals": ["--storage-options", "globals", "IN"],
    "extract": ["--storage-options", "extract", "IN", "weight", "-o", "b.pt"],
    "convert": ["--storage-options", "convert", "IN", "b.pt"],
    "compact": ["--storage-options", "compact", "IN", "--dry-run"],
    "diff, a": ["--a-storage-options", "diff", "-q", "IN", "local.pt"],
    "diff, b": ["--b-storage-options", "diff", "-q", "local.pt", "IN"],
    "extract to": ["--target-storage-options", "extract", "local.pt", "weight", "-o", "OUT"],
    "convert to": ["--target-storage-options", "convert", "local.pt", "OUT"],
    "compact to": ["--target-storage-options", "compact", "local.pt", "-o", "OUT"],
}


@pytest.fixture(autouse=True)
def _files(_clean_file_systems: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints in this directory, with copies in the guarded file system."""
    monkeypatch.chdir(tmp_path)
    ptsave.save(STATE, "model.pt")
    ptsave.save(STATE, "old.pt", _use_new_zipfile_serialization=False)
    convert("model.pt", "model.safetensors")
    ptsave.save_model(STATE, "shards", max_shard_size=24)
    file_systems.guarded().put(f"{tmp_path}/", "/in/", recursive=True)
    ptsave.save(STATE, "local.pt")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("read", READS)
def test_reads(read: str, name: str) -> None:
    url = f"guarded://in/{name}"
    READS[read](url, storage_options=TOKEN)
    with pytest.raises(PermissionError, match="no token"):
        READS[read](url, storage_options={})


@pytest.mark.parametrize("write", WRITES)
def test_writes(write: str) -> None:
    before = len(file_systems.guarded().store)
    with pytest.raises(PermissionError, match="no token"):
        WRITES[write]("guarded://out/model.pt", storage_options={})
    WRITES[write]("guarded://out/model.pt", storage_options=TOKEN)
    assert len(file_systems.guarded().store) == before + 1


@pytest.mark.parametrize("operation", [*READS, *WRITES])
def test_they_are_for_urls(operation: str) -> None:
    call = {**READS, **WRITES}[operation]
    sources: list[Any] = ["model.pt", Path("model.pt")]
    if operation in READS or operation in TO_STREAMS:
        sources.append(io.BytesIO(Path("model.pt").read_bytes()))
    for f in sources:
        with pytest.raises(TypeError, match="storage_options are only for URLs"):
            call(f, storage_options=TOKEN)


def test_of_a_target_that_is_the_source() -> None:
    with pytest.raises(TypeError, match="storage_options are only for URLs"):
        compact("model.pt", target_storage_options=TOKEN)


def test_one_url_with_two_options() -> None:
    url = "guarded://in/model.pt"
    assert compare(url, url, a_storage_options=TOKEN, b_storage_options=TOKEN).equal
    with pytest.raises(PermissionError, match="no token"):
        compare(url, url, a_storage_options=TOKEN)


# --------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str) -> None:
    option, *words = COMMANDS[command]
    for name in NAMES:
        urls = {"IN": f"guarded://in/{name}", "OUT": "guarded://out/model.pt"}
        arguments = [urls.get(word, word) for word in words]
        assert run(*arguments).stderr.startswith("ptsave: no token")
        found = run(*arguments, option, json.dumps(TOKEN))
        assert (found.exit_code, found.stderr) == (0, "")
        Path("b.pt").unlink(missing_ok=True)
        file_systems.guarded().store.pop("/out/model.pt", None)
    arguments = [{"IN": "model.pt", "OUT": "b.pt"}.get(word, word) for word in words]
    found = run(*arguments, option, json.dumps(TOKEN))
    assert found.exit_code == 2
    assert found.stderr == "ptsave: storage_options are only for URLs, and this is not a URL\n"


@pytest.mark.parametrize(
    ("value", "words"),
    [("secret=1", "not JSON"), ("[" * 100_000, "not JSON"), ("[1]", "not a list")],
)
def test_what_is_no_object(value: str, words: str) -> None:
    found = run("ls", "guarded://in/model.pt", "--storage-options", value)
    assert found.exit_code == 2
    assert "Invalid value for '--storage-options'" in found.stderr
    assert words in found.stderr
    assert """'{"anon": true}'""" in found.stderr
    assert "secret" not in found.stderr


def test_names_are_completed() -> None:
    context = click.Context(ls)
    context.params = {"file": "guarded://in/model.pt", "storage_options": TOKEN}
    found = complete_names(context, ls.params[1], "w")
    assert [each.value for each in found] == ["weight"]
