"""Generated objects: the same bytes from both engines, and the same objects back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_strategies import CHECKPOINTS
from hypothesis import given, settings
from hypothesis import strategies as st
from stock_comparison import (
    assert_interchangeable,
    assert_same_bytes,
    assert_same_object,
    stock_load,
    stock_save,
)
from torch.utils.serialization import config as torch_config

import ptsave

config: Any = torch_config  # a module with methods, which type checkers do not know

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@given(obj=CHECKPOINTS)
def test_objects(obj: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Same bytes in memory and in a file, same objects from memory, a path and an open file."""
    assert_interchangeable(obj, _folder(tmp_path_factory))


def _folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder for one example; each uses the same names again."""
    return factory.getbasetemp() / "hypothesis"


OPTIONS = st.fixed_dictionaries(
    {"storage_alignment": st.sampled_from([1, 8, 64, 100, 4096]), "compute_crc32": st.booleans()}
)
ARGUMENTS = st.fixed_dictionaries(
    {"pickle_protocol": st.sampled_from([2, 3, 4, 5]), "_disable_byteorder_record": st.booleans()}
)


@given(obj=CHECKPOINTS, options=OPTIONS, arguments=ARGUMENTS)
@pytest.mark.filterwarnings("ignore::ptsave.CheckpointWarning")
def test_options(
    obj: Any,
    options: dict[str, Any],
    arguments: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    before = config.get_config_copy()
    for name, value in options.items():
        setattr(config.save, name, value)
    try:
        assert_interchangeable(obj, _folder(tmp_path_factory), weights_only=[False], **arguments)
    finally:
        config.load_config(before)


@given(
    obj=CHECKPOINTS,
    header=st.binary(max_size=40),
    map_location=st.sampled_from(["cpu", "meta", {}]),
)
def test_memory_at_an_offset(obj: Any, header: bytes, map_location: Any) -> None:
    ours, theirs = io.BytesIO(header), io.BytesIO(header)
    for stream, save in ((ours, ptsave.save), (theirs, stock_save)):
        stream.seek(len(header))
        save(obj, stream)
    assert ours.getvalue() == theirs.getvalue()
    assert ours.tell() == theirs.tell()
    for stream in (ours, theirs):
        stream.seek(len(header))
    loaded = ptsave.load(ours, map_location=map_location)
    assert_same_object(loaded, stock_load(theirs, map_location=map_location))


@given(
    obj=CHECKPOINTS,
    name=st.text(
        st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"),
        min_size=1,
        max_size=30,
    ),
)
def test_names(obj: Any, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The name of the file is part of its content."""
    folder = _folder(tmp_path_factory) / "names"
    assert_same_bytes(obj, folder, name=f"{name}.pt")
    ours, theirs = (folder / engine / f"{name}.pt" for engine in ("ptsave", "stock"))
    assert_same_object(ptsave.load(ours), stock_load(theirs))
    for path in (ours, theirs):
        path.unlink()


@given(obj=CHECKPOINTS)
def test_mmap(obj: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = _folder(tmp_path_factory)
    assert_same_bytes(obj, folder)
    path = folder / "ptsave" / "file.pt"
    for weights_only in (True, False):
        options: dict[str, Any] = {"mmap": True, "weights_only": weights_only}
        assert_same_object(ptsave.load(path, **options), stock_load(path, **options))


@given(
    sizes=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=6),
    threads=st.sampled_from(["1", "2", "5"]),
    direct=st.sampled_from(["0", "1"]),
)
@settings(max_examples=10)
def test_sizes_of_several_chunks(
    sizes: list[int], threads: str, direct: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However the work is cut into pieces."""
    obj = [torch.arange(size, dtype=torch.int64) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PTSAVE_NUM_THREADS", threads)
        patch.setenv("PTSAVE_DIRECT_IO", direct)
        assert_interchangeable(obj, _folder(tmp_path_factory), weights_only=[True])
