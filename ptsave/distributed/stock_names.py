"""Replaces DCP's ``FileSystemWriter`` and ``FileSystemReader``, for code that you cannot edit.

Accelerate, composer and Lightning look up the two classes in `torch.distributed.checkpoint` when
they save or load.  DCP itself looks them up in calls with a ``checkpoint_id``.  Calls without a
planner get ptsave's planners.  Errors of DCP's collectives name the checkpoint and the rank.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint
from torch.distributed.checkpoint import (
    default_planner,
    filesystem,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint import planner as planners
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from ptsave.distributed.planners import LoadPlanner, SavePlanner
from ptsave.distributed.reader import StorageReader
from ptsave.distributed.writer import StorageWriter
from ptsave.support import torch_dcp

_StockWriter: Any = filesystem.FileSystemWriter
_StockReader: Any = filesystem.FileSystemReader


class FileSystemWriter(StorageWriter):
    """`StorageWriter` with the arguments of torch's class.

    Arguments for threads and copies have no effect, because the engine decides on both.  A call
    with another format, extensions or a file per tensor makes an instance of torch's class.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of torch's class if ptsave does not support the arguments."""
        if cls is not FileSystemWriter:  # a derived class may have other arguments
            return super().__new__(cls)
        try:
            given = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments
        except TypeError:  # __init__ raises this error, with the name of the class
            return super().__new__(cls)
        torch_format = filesystem.SerializationFormat.TORCH_SAVE
        if (
            not given.get("single_file_per_rank", True)
            or given.get("_extensions") is not None
            or given.get("serialization_format", torch_format) is not torch_format
        ):
            return _StockWriter(*args, **kwargs)
        return super().__new__(cls)

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: Any = None,
    ) -> None:
        if _extensions is not None:  # a derived class passes extensions
            raise NotImplementedError(
                f"{type(self).__name__}: ptsave has no extensions such as compression: derive "
                "the class from torch.distributed.checkpoint.filesystem.FileSystemWriter"
            )
        super().__init__(path, fsync=sync_files, overwrite=overwrite)

    def __getnewargs__(self) -> tuple[str]:
        """Return the arguments that `__new__` gets when a pickled writer is loaded."""
        return (self.checkpoint_id,)

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return Path(self.checkpoint_id)


class FileSystemReader(StorageReader):
    """`StorageReader` with torch's arguments; a call with extensions makes torch's own reader."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of torch's class if extensions are passed."""
        if cls is FileSystemReader and (any(args[1:]) or kwargs.get("_extension_registry")):
            return _StockReader(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        super().__init__(path)

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return Path(self.checkpoint_id)

    @property
    def storage_data(self) -> dict[Any, Any]:
        """Where each item of the current checkpoint is; empty before its metadata is read."""
        metadata: Metadata | None = self._metadata
        return {} if metadata is None else metadata.storage_data

    @property
    def load_id(self) -> str:
        """The id of the load, which `read_metadata` adds to the metadata."""
        return self._load_id

    def read_data(self, plan: planners.LoadPlan, planner: planners.LoadPlanner) -> Future[None]:
        """Read the items of a plan; if extensions have transformed items, torch's class reads all.

        Torch's class knows its own extensions, such as ``ZStandard``, without a registry.
        """
        infos = self.storage_data.values()
        if not any(getattr(info, "transform_descriptors", None) for info in infos):
            return super().read_data(plan, planner)
        stock = _StockReader(self._path)
        stock.set_up_storage_reader(self._metadata, is_coordinator=False)
        future: Future[None] = stock.read_data(plan, planner)
        return future


# ------------------------------------------------------------ errors of DCP's collectives
#
# DCP sends plans and results of all ranks to one rank and back.  If a rank ends or does not answer,
# the process group's error names neither the checkpoint nor the rank.

# The directory or URL of the save or load that this thread is making.
_checkpoint: ContextVar[object] = ContextVar("_checkpoint", default=None)


def _naming_checkpoint(function: Callable[..., Any], storage: str) -> Callable[..., Any]:
    """Wrap a function of DCP so that errors during a call can name its checkpoint."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        token = _checkpoint.set(getattr(given[storage], "checkpoint_id", None))
        try:
            return function(*args, **kwargs)
        finally:
            _checkpoint.reset(token)

    return call


save_state_dict = _naming_checkpoint(torch_dcp.save_state_dict, "storage_writer")
load_state_dict = _naming_checkpoint(torch_dcp.load_state_dict, "storage_reader")


def _naming_ranks(name: str) -> Callable[..., Any]:
    """Wrap a method that exchanges values between ranks so that its errors name the rank."""
    method = getattr(torch_dcp.DistWrapper, name)

    @functools.wraps(method)
    def exchange(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except RuntimeError as error:
            raise self.named(error) from error

    return exchange


def _noting_step(name: str) -> Callable[..., Any]:
    """Wrap a method that makes one step of a save or load so that errors name the step."""
    method = getattr(torch_dcp.DistWrapper, name)

    @functools.wraps(method)
    def make(self: Any, step: str, *args: Any) -> Any:
        self.step = step
        return method(self, step, *args)

    return make


class NamingGroup(torch_dcp.DistWrapper):  # type: ignore[misc]  # found at run time
    """DCP's wrapper of a process group, with errors that name checkpoint, rank and step."""

    step = ""

    def named(self, error: RuntimeError) -> RuntimeError:
        """Return an error of the same type that names the checkpoint, the rank and the step."""
        where, step = _checkpoint.get(), f" in the step {self.step!r}" if self.step else ""
        message = (
            f"{'the checkpoint' if where is None else where}: rank {self.get_rank()} of "
            f"{self.get_world_size()} could not go on{step}: another rank has ended or does not "
            f"answer: {error}"
        )
        try:
            return type(error)(message)
        except TypeError:  # the type needs other arguments
            return RuntimeError(message)

    broadcast_object = _naming_ranks("broadcast_object")
    gather_object = _naming_ranks("gather_object")
    all_gather_object = _naming_ranks("all_gather_object")
    scatter_object = _naming_ranks("scatter_object")
    barrier = _naming_ranks("barrier")

    reduce_scatter = _noting_step("reduce_scatter")
    all_reduce = _noting_step("all_reduce")
    all_gather = _noting_step("all_gather")
    broadcast = _noting_step("broadcast")


# ------------------------------------------------------------------- torch's names, exchanged


# isinstance() with these names accepts instances of torch's classes, which libraries may have made.
FileSystemWriter.register(_StockWriter)
FileSystemReader.register(_StockReader)
# Module, name, torch's object, ptsave's object.  DCP looks up the storages for a ``checkpoint_id``,
# the planners for a call without a planner, and the other names to exchange plans and results.
_NAMES: tuple[tuple[Any, str, Any, Any], ...] = (
    (checkpoint, "FileSystemWriter", _StockWriter, FileSystemWriter),
    (checkpoint, "FileSystemReader", _StockReader, FileSystemReader),
    (torch_dcp.storage_setup_module, "FileSystemWriter", _StockWriter, FileSystemWriter),
    (torch_dcp.storage_setup_module, "FileSystemReader", _StockReader, FileSystemReader),
    (state_dict_saver, "DefaultSavePlanner", default_planner.DefaultSavePlanner, SavePlanner),
    (state_dict_loader, "DefaultLoadPlanner", default_planner.DefaultLoadPlanner, LoadPlanner),
    (state_dict_saver, "_save_state_dict", torch_dcp.save_state_dict, save_state_dict),
    (state_dict_loader, "_load_state_dict", torch_dcp.load_state_dict, load_state_dict),
    (state_dict_saver, "_DistWrapper", torch_dcp.DistWrapper, NamingGroup),
    (state_dict_loader, "_DistWrapper", torch_dcp.DistWrapper, NamingGroup),
)

_lock = threading.Lock()


def exchange(*, installed: bool) -> None:
    """With `installed`, replace torch's objects by ptsave's; otherwise, put torch's back.

    If other code has replaced one of these objects, its replacement stays.
    """
    with _lock:
        for module, name, stock, ours in _NAMES:
            before, after = (stock, ours) if installed else (ours, stock)
            if getattr(module, name) is before:
                setattr(module, name, after)
