"""Each row of the page of limits, carried out."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import re
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import json_of
from doc_runner import ROOT
from forked_ranks import ForkedRanks
from stock_comparison import save_without_checksums
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.stateful import Stateful

import ptsave
from ptsave import _C
from ptsave.deltas import Publisher, apply
from ptsave.distributed import StorageWriter
from ptsave.sources.locations import LocalFolder
from ptsave.training.peers import PeerServer

PAGE = (ROOT / "docs" / "limits.md").read_text()
ROWS = dict(re.findall(r"^\| (.+?) \| (.+?) \| .+? \|$", PAGE, re.MULTILINE))
CHECKS: dict[str, Callable[[], object]] = {}


def refuses(row: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register what a row says is refused, which has to raise the first error that it names."""

    def register(action: Callable[[], object]) -> Callable[[], object]:
        def check() -> None:
            name = re.findall(r"`(\w+)`", ROWS[row])[0]
            with pytest.raises(Exception) as caught:
                action()
            assert name in {kind.__name__ for kind in type(caught.value).__mro__}, caught.value

        CHECKS[row] = check
        return check

    return register


def accepts(row: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a check of a row of the other table."""

    def register(action: Callable[[], object]) -> Callable[[], object]:
        CHECKS[row] = action
        return action

    return register


class Own:
    """A class that no allow-list has."""


def damaged(name: str) -> str:
    """Write a file of one tensor of ones, and change a byte of it."""
    tensors = {"weight": torch.ones(1000)}
    if name.endswith(".safetensors"):
        from safetensors.torch import save_file

        save_file(tensors, name)
    else:
        torch.save(tensors, name)
    data = Path(name).read_bytes()
    payload = torch.ones(1000).numpy().tobytes()
    Path(name).write_bytes(data.replace(payload, payload[:-1] + b"\x40"))
    return name


refuses("a URL as a `pathlib.Path`")(lambda: ptsave.save([1], pathlib.Path("s3://bucket/a.pt")))
refuses("an `ArchiveWriter` or a capture at a URL")(lambda: ptsave.ArchiveWriter("memory://a.pt"))
refuses("`async_save` in the format before torch 1.6")(
    lambda: ptsave.async_save([1], "a.pt", _use_new_zipfile_serialization=False)
)
refuses("an index of shards as an open file")(
    lambda: ptsave.open(io.BytesIO(b'{"weight_map": {"weight": "model-00001-of-00002.pt"}}'))
)
refuses("objects called `fsync`, `atomic`, `progress` or `storage_options` in a checkpoint")(
    lambda: ptsave.save_checkpoint("a.pt", fsync=torch.ones(1))  # type: ignore[arg-type]
)
refuses("parts of several ranks at a URL, without a process group")(
    lambda: ptsave.AsyncCheckpointer("memory://run", rank=0, world_size=2)
)
refuses("sparse tensors in `save_model`")(
    lambda: ptsave.save_model({"weight": torch.eye(2).to_sparse()}, "model")
)


@refuses("`load(url, mmap=True)`")
def _() -> None:
    ptsave.save([1], "memory://a.pt")
    ptsave.load("memory://a.pt", mmap=True)


@refuses("a pipe, a socket, `/dev/stdin` of a pipe")
def _() -> None:
    os.mkfifo("pipe")
    ptsave.load("pipe")


@refuses("a write to `http://`, `hf://`, `zip://` or a chain (`::`)")
def _() -> None:
    urls = ["hf://user/a.pt", "zip://a.pt", "simplecache::memory://a.pt", "http://host/a.pt"]
    for url in urls[:-1]:
        with pytest.raises(ptsave.UnsupportedUrlError):
            ptsave.save([1], url)
    ptsave.save([1], urls[-1])


@refuses("values other than tensors in safetensors")
def _() -> None:
    with pytest.raises(TypeError):
        ptsave.save_model({"epoch": 3}, "model")  # type: ignore[dict-item]
    torch.save({"epoch": 3, "weight": torch.ones(2)}, "a.pt")
    ptsave.convert("a.pt", "a.safetensors")


@refuses("an expanded tensor that becomes larger than 8 times its storage and 1 GiB")
def _() -> None:
    torch.save({"weight": torch.ones(1).expand(1 << 30)}, "a.pt")
    ptsave.convert("a.pt", "a.safetensors")


@refuses("`save(base=)` to an open file")
def _() -> None:
    torch.save([], "old.pt")
    ptsave.save([], io.BytesIO(), base="old.pt")


@refuses("objects of your own classes, with `weights_only=True`")
def _() -> None:
    torch.save(Own(), "a.pt")
    ptsave.load("a.pt", weights_only=True)


@refuses("parts of two ranks, restored by one")
def _() -> None:
    model = torch.nn.Linear(1, 1)

    def save(rank: int) -> None:
        with ptsave.AsyncCheckpointer("run", rank=rank, world_size=2) as checkpointer:
            checkpointer.save(1, model=model)

    with ThreadPoolExecutor() as threads:  # they wait for each other
        list(threads.map(save, range(2)))
    ptsave.AsyncCheckpointer("run").restore(model=model)


@refuses("`AsyncCheckpointer(peers=1)` of one process")
def _() -> None:
    ptsave.AsyncCheckpointer("slow", local="fast", peers=1)


@refuses("a rank that ends during `dcp.save`")
def _() -> None:
    class Ending(Stateful):
        def state_dict(self) -> dict[str, Any]:
            os._exit(0)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def save(rank: int) -> None:
        state = {"weight": torch.ones(2), **({"ending": Ending()} if rank else {})}
        try:
            save_distributed(state, storage_writer=StorageWriter("checkpoint"))
        except RuntimeError as error:
            Path("words").write_text(str(error))
        os._exit(0)  # the group is broken, and would be waited for

    ForkedRanks(Path.cwd(), save).join()
    words = Path("words").read_text()
    assert "gloo" in words
    assert "checkpoint" not in words
    raise RuntimeError(words)


@refuses(
    "a checkpoint of `ptsave.distributed` that another save replaces while it is open or loaded"
)
def _() -> None:
    def save() -> None:
        state = {"weight": torch.ones(2)}
        save_distributed(state, storage_writer=StorageWriter("checkpoint"), no_dist=True)

    save()
    with ptsave.open("checkpoint") as archive:
        save()
        archive.get_tensor("weight")


@refuses("`save` of `AsyncCheckpointer(rank=0)` on another rank")
def _() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        ptsave.AsyncCheckpointer("run", rank=0).save(1, model=torch.nn.Linear(1, 1))


@refuses('`match="name"` with an optimizer without names')
def _() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    ptsave.load_optimizer_state_dict(optimizer, optimizer.state_dict(), match="name")


@accepts("`mmap=True`")
def _() -> None:
    assert not ptsave.load(damaged("a.pt"), mmap=True)["weight"].eq(1).all()


@accepts("a safetensors file of another program")
def _() -> None:
    pytest.importorskip("safetensors")
    assert not ptsave.load(damaged("a.safetensors"))["weight"].eq(1).all()


@accepts("a slice of a `.pt` file's tensor")
def _() -> None:
    with ptsave.open(damaged("a.pt")) as archive:
        assert not archive.get_slice("weight")[1:].eq(1).all()
        with pytest.raises(ptsave.CorruptCheckpointError):
            archive.get_tensor("weight")


@accepts("a file of `set_crc32_options(False)`")
def _() -> None:
    save_without_checksums({"weight": torch.ones(2)}, Path("a.pt"))
    with pytest.warns(ptsave.CheckpointWarning):
        ptsave.load("a.pt")
    ptsave.convert("a.pt", "b.pt")
    ptsave.load("b.pt")  # does not warn


@accepts("a file of torch before 1.6")
def _() -> None:
    torch.save({"weight": torch.ones(1000)}, "a.pt", _use_new_zipfile_serialization=False)
    data = Path("a.pt").read_bytes()
    Path("a.pt").write_bytes(data[:-2] + b"\0\0")
    assert not ptsave.load("a.pt")["weight"].eq(1).all()


@accepts("a name that `from torch import save` has bound")
def _() -> None:
    from torch import save

    with ptsave.installed():
        assert save is not torch.save


@accepts("`save(base=)` on ext4, or with a base on another file system")
def _() -> None:
    state = torch.ones(1 << 20)
    ptsave.save(state, "old.pt")
    ptsave.save(state, "memory://new.pt", base="old.pt")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        saved = ptsave.save(state, f"{folder}/new.pt", base="old.pt")
        assert saved == (os.path.getsize(f"{folder}/new.pt"), 0)


@accepts("`save(base=)` with a tensor that has moved by less than a page")
def _() -> None:
    # Where files share blocks, tests/writing/test_base.py compares both alignments.
    state = torch.ones(1 << 20)
    ptsave.save([state], "old.pt")
    saved = ptsave.save([state], "a longer name.pt", base="old.pt")
    assert saved == (os.path.getsize("a longer name.pt"), 0)


@accepts("several hard links to one file")
def _() -> None:
    ptsave.save(1, "a.pt")
    Path("b.pt").hardlink_to("a.pt")
    ptsave.save(2, "a.pt")
    assert ptsave.load("b.pt") == 1


@accepts("a view of a tensor")
def _() -> None:
    ptsave.save(torch.zeros(1000)[:1], "a.pt")
    assert Path("a.pt").stat().st_size > 4000
    ptsave.compact("a.pt", "b.pt")
    assert Path("b.pt").stat().st_size < 4000


@accepts("a file that was changed in place")
def _() -> None:
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.load(damaged("a.pt"))
    ptsave.load("a.pt", verify=False)


@accepts("a forged file, whose checksum was changed, too")
def _() -> None:
    torch.save(torch.ones(1000), "a.pt")
    old, new = (torch.full((1000,), value).numpy().tobytes() for value in (1.0, 2.0))
    data = Path("a.pt").read_bytes().replace(old, new)
    crcs = [struct.pack("<I", zlib.crc32(each)) for each in (old, new)]
    Path("a.pt").write_bytes(data.replace(crcs[0], crcs[1]))
    assert ptsave.load("a.pt").eq(2).all()


@refuses("a tensor of 4 GiB or more in `deltas.Publisher`")
def _() -> None:
    Publisher("versions", {"weight": torch.zeros(1, dtype=torch.uint8).expand(1 << 32)})


@refuses("`deltas.apply` to files that are links, as in the cache of Hugging Face")
def _() -> None:
    ptsave.save_model({"weight": torch.zeros(9)}, "blob.safetensors")
    Path("model.safetensors").symlink_to("blob.safetensors")
    Publisher("versions", "blob.safetensors").publish({"weight": torch.ones(9)})
    apply("versions", "model.safetensors")


@accepts("a process that is killed while `deltas.apply` changes files")
def _() -> None:
    states = [{"a": torch.full((9,), i), "b": torch.full((9,), i)} for i in range(2)]
    ptsave.save_model(states[0], "model.safetensors")
    Publisher("versions", "model.safetensors").publish(states[1])

    def change_one(changes: Any, n_threads: int) -> None:
        apply_changes(changes[:1], n_threads=n_threads)
        os._exit(0)

    apply_changes = _C.apply_changes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C, "apply_changes", change_one)
        if (child := os.fork()) == 0:
            apply("versions", "model.safetensors")
        os.waitpid(child, 0)
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.load("model.safetensors")
    apply("versions", "model.safetensors")
    assert torch.equal(ptsave.load("model.safetensors")["b"], states[1]["b"])


@accepts("copies between hosts (`peers=`)")
def _() -> None:
    options = {"fsync": False, "accepts": lambda name: True, "report": lambda rank, save: [save]}
    server = PeerServer(LocalFolder("."), "secret", 10, **options)  # type: ignore[arg-type]
    try:
        for token, is_served in (("other", False), ("secret", True)):
            message = {"token": token, "request": "done", "rank": 0, "save": [1]}
            text = json.dumps(message).encode()
            with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
                connection.sendall(struct.pack(">I", len(text)) + text)  # plain TCP
                assert bool(connection.recv(1000)) == is_served
    finally:
        server.close()


@accepts("copies that only manifests name")
def _() -> None:
    with ptsave.AsyncCheckpointer("slow", local="fast") as checkpointer:
        checkpointer.save(1, epoch=1)
    for file in Path("slow").iterdir():
        file.unlink()
    (alone,) = json_of("ls", "fast")["steps"]
    (with_slow,) = json_of("ls", "fast", "slow")["steps"]
    assert [each["protected"] for each in (alone, with_slow)] == [True, False]


def refused(action: Callable[[], object]) -> None:
    with pytest.raises(pickle.UnpicklingError):
        action()


@accepts("`load`, as `torch.load`")
def _() -> None:
    for name, value in (("path.pt", Path("a")), ("own.pt", Own())):
        torch.save([value], name)
        refused(lambda name=name: torch.load(name))  # type: ignore[misc]
        refused(lambda name=name: ptsave.load(name))  # type: ignore[misc]


@accepts("`load_into`, `load_checkpoint`, `AsyncCheckpointer.restore`")
def _() -> None:
    torch.save({"path": Path("a")}, "path.pt")
    assert ptsave.load_checkpoint("path.pt") == {"path": Path("a")}
    torch.save({"own": Own()}, "own.pt")
    refused(lambda: ptsave.load_checkpoint("own.pt"))


@accepts("`open`, `ls`, `show`, `extract`, `diff`, `verify`, `convert`, `compact`")
def _() -> None:
    torch.save({"path": Path("a"), "own": Own()}, "own.pt")
    with ptsave.open("own.pt") as archive:
        assert archive["path"] == Path("a")
        refused(lambda: archive["own"])


def test_every_row_has_a_check() -> None:
    assert {row for row in ROWS if row not in ("what", "---")} == set(CHECKS)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("row", CHECKS)
def test_row(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    CHECKS[row]()
