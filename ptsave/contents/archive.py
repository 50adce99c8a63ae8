"""`ptsave.open`: a checkpoint whose tensors are read only on request.

torch's restricted unpickler builds the object once, over storages without bytes.  Its tensors take
no memory, and no caller gets them.  To read a part, the archive indexes such a tensor: the strides
of the result say which blocks of the storage to read.  Only whole records can be verified, because
a checksum covers a whole record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ptsave.contents.contents import ChunkInfo, Contents, facts_of
from ptsave.contents.opening import OpenOptions, open_checkpoint
from ptsave.sources.locations import describe
from ptsave.support.calls import check_flags, one_of, pausing_garbage_collection
from ptsave.tree.containers import Path
from ptsave.tree.extents import check_index
from ptsave.tree.leaves import read_entry
from ptsave.tree.tree import EntryNames, type_name_of

if TYPE_CHECKING:
    from ptsave.capturing.run import CapturedRun
    from ptsave.capturing.schema import CapturedCall, CapturedValue, CaptureSummary

__all__ = ["Archive", "TensorInfo", "TensorSlice", "open"]


class Archive:
    """An open checkpoint; :func:`ptsave.open` makes one.

    Safe for concurrent use by threads.  A read that has started completes even if another thread
    closes the archive.

    Attributes
    ----------
    path : str
        The checkpoint's name in messages.
    """

    def __init__(self, contents: Contents, path: str, *, verify: bool) -> None:
        self.path = path
        self._verify = None if verify else False
        self._open_contents: Contents | None = contents

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._open_contents = None
        self.__dict__.pop("_names", None)
        self.__dict__.pop("_infos", None)
        self.__dict__.pop("_run", None)

    @property
    def closed(self) -> bool:
        """Whether the archive has been closed."""
        return self._open_contents is None

    def __enter__(self) -> Archive:
        self._contents  # noqa: B018 - raises if it is closed
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ptsave.Archive {self.path!r}{' (closed)' if self.closed else ''}>"

    @property
    def metadata(self) -> dict[str, str]:
        """The format and version of an archive, or the metadata of a safetensors file."""
        return dict(self._contents.metadata)

    def keys(self) -> list[str | Path]:
        """Return the names of all tensors, in the order of the file.

        A name joins the keys of dicts, lists and tuples with dots.  If two tensors would get the
        same name, each is named by its tuple of keys.  If the whole object is a tensor, its name
        is ``""``.
        """
        return list(self._names.names)

    def __iter__(self) -> Iterator[str | Path]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._names.names)

    def __contains__(self, name: object) -> bool:
        try:
            self._names.find(name)  # type: ignore[arg-type]
        except (KeyError, TypeError):
            return False
        return True

    def info(self, name: str | Path) -> TensorInfo:
        """Return the dtype, shape, strides and place of a tensor, without reading it.

        Raises
        ------
        KeyError
            If no entry has this name, or if several entries may be meant.
        TypeError
            If the entry is not a tensor.
        """
        tensor = self._tensor(name)
        number = self._names.number_of(name, tensor)
        return self._infos[number]

    def infos(self) -> list[TensorInfo]:
        """Return the `info` of all tensors, in the order of `keys`."""
        return list(self._infos)

    def __getitem__(self, name: str | Path) -> Any:
        """Return an entry as :func:`ptsave.load` would; all tensors in a container are read."""
        contents = self._contents
        entry = self._names.find(name)
        return read_entry(
            entry,
            lambda tensors: contents.read(tensors, self._verify),
            f"{self.path}: {name!r}",
        )

    def get_tensor(
        self,
        name: str | Path,
        device: torch.device | str | None = None,
        *,
        verify: bool | None = None,
        map_location: torch.device | str | None = None,
    ) -> Tensor:
        """Read one tensor.

        Only the bytes between the tensor's first and last element are read.  The result has its own
        memory.  It has the file's strides unless these would leave much of the memory unused.

        Parameters
        ----------
        name : str or tuple
            One of `keys`.
        device : torch.device or str, optional
            Target device: the CPU by default, wherever the tensor was saved from.
        verify : bool, optional
            Whether to compare checksums.  A checksum covers a whole storage.  By default, it is
            compared if the whole storage is read.  True always reads the whole storage.
        map_location : torch.device or str, optional
            Another name of `device`.

        Raises
        ------
        KeyError
            If no entry has this name, or if several entries may be meant.
        TypeError
            If the entry is not a tensor.
        CorruptCheckpointError
            If the data is damaged.
        """
        device = one_of(device=device, map_location=map_location)
        return self._read(self._tensor(name), device, verify)

    def get_slice(
        self,
        name: str | Path,
        device: torch.device | str | None = None,
        *,
        verify: bool | None = None,
        map_location: torch.device | str | None = None,
    ) -> TensorSlice:
        """Return an object that reads a part of a tensor each time you index it.

        Parameters
        ----------
        name : str or tuple
            One of `keys`.
        device : torch.device or str, optional
            Device that parts are read to: the CPU by default.
        verify, map_location
            As for `get_tensor`.

        Examples
        --------
        >>> import io, torch, ptsave
        >>> stream = io.BytesIO()
        >>> ptsave.save({"weight": torch.arange(12).reshape(3, 4)}, stream)
        >>> _ = stream.seek(0)
        >>> with ptsave.open(stream) as archive:
        ...     archive.get_slice("weight")[1:, :2]
        tensor([[4, 5],
                [8, 9]])
        """
        contents, tensor = self._contents, self._tensor(name)
        verify = self._verify if verify is None else verify
        device = one_of(device=device, map_location=map_location)
        place = torch.device("cpu" if device is None else device)
        return TensorSlice(contents, tensor, verify, place)

    def tensors(self) -> Mapping[Any, Tensor]:
        """Return a mapping from names to tensors, which reads a tensor on each access."""
        return _LazyTensors(self)

    def verify(self, *, progress: bool = False) -> None:
        """Compare all data in the file with its checksums.

        The data is not kept, so this needs little memory.  A safetensors file has no checksums.

        Parameters
        ----------
        progress : bool, default False
            Whether to show a progress bar.

        Raises
        ------
        CorruptCheckpointError
            If data is damaged; the message names the records and the entries that use them.
        """
        self._contents.verify(progress=progress)

    # ----------------------------------------------------------------------------- captures

    def calls(self) -> list[CapturedCall]:
        """Return the calls of modules that :func:`ptsave.capture` has recorded; no tensor is read.

        If the process was killed while it captured, open the file with ``recover=True``.  Only
        calls whose records were written are returned; `parent` may be a call without a record.

        Returns
        -------
        list of CapturedCall
            In the order in which they began.  `CapturedCall.values` maps paths to the arguments,
            results and gradients, with dtypes, shapes and statistics.  `tensor` reads a value.

        Raises
        ------
        ValueError
            If the file is not a capture, or if a later version of ptsave wrote it.
        CorruptCheckpointError
            If its records are damaged.

        Examples
        --------
        >>> import os, tempfile, torch, ptsave
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "run.pt")
        ...     with ptsave.capture(model, path):
        ...         _ = model(torch.ones(2, 4))
        ...     with ptsave.open(path) as run:
        ...         for call in run.calls():
        ...             print(call.id, call.parent, call.module, call.values["outputs"].shape)
        ...         relu = call.values["outputs"]
        ...         print(relu.statistics.min >= 0, relu.name, run.tensor(relu.name).shape)
        0 None  (2, 3)
        1 0 0 (2, 3)
        2 0 1 (2, 3)
        True 0/forward/1#0/outputs torch.Size([2, 3])
        """
        with pausing_garbage_collection():
            return self._run.calls()

    def captured_values(
        self, phase: str | None = None, step: int | None = None
    ) -> list[CapturedValue]:
        """Return the values that a capture has recorded, in the order of their events.

        Parameters
        ----------
        phase : str, optional
            ``"params"`` or ``"grads"`` selects the values of parameters.  ``"forward"``,
            ``"backward"``, ``"recompute"`` and ``"recompute_backward"`` select values of calls.
        step : int, optional
            Only values of this step.

        Raises
        ------
        ValueError, CorruptCheckpointError
            As from `calls`.
        """
        with pausing_garbage_collection():
            return list(self._run.values(phase, step))

    def tensor(
        self,
        name: str,
        device: torch.device | str | None = None,
        *,
        verify: bool | None = None,
        map_location: torch.device | str | None = None,
    ) -> Tensor:
        """Read one tensor of a capture.

        Parameters
        ----------
        name : str
            Name of a value, such as ``"0/forward/layers.1#0/inputs/0"``.
        device : torch.device or str, optional
            Target device: the CPU by default.
        verify, map_location
            As for `get_tensor`.

        Raises
        ------
        KeyError
            If no value has this name, or if its tensor is not in the file; the message says why.
        TypeError
            If the value is not a tensor.
        ValueError, CorruptCheckpointError
            As from `calls`.  CorruptCheckpointError also if the tensor's data is damaged.
        """
        device = one_of(device=device, map_location=map_location)
        return self._read(self._run.tensor(name), device, verify)

    def summary(self) -> CaptureSummary:
        """Return totals of a capture, and of each module class in it; no tensor is read.

        Raises
        ------
        ValueError, CorruptCheckpointError
            As from `calls`.

        Examples
        --------
        >>> import os, tempfile, torch, ptsave
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "run.pt")
        ...     with ptsave.capture(model, path, what=["outputs"]):
        ...         _ = model(torch.ones(2, 4))
        ...     with ptsave.open(path) as run:
        ...         summary = run.summary()
        >>> [(each.name, each.n_calls, each.shapes) for each in summary.classes]
        [('Sequential', 1, ((2, 3),)), ('Linear', 1, ((2, 3),)), ('ReLU', 1, ((2, 3),))]
        """
        with pausing_garbage_collection():
            return self._run.summary()

    @cached_property
    def _run(self) -> CapturedRun:
        from ptsave.contents.captures import captured_run

        with pausing_garbage_collection():
            return captured_run(self._contents.obj, self.path)

    # -------------------------------------------------------------------------------- parts

    def _read(
        self, tensor: Tensor, device: torch.device | str | None, verify: bool | None
    ) -> Tensor:
        contents = self._contents
        verify = self._verify if verify is None else verify
        if device is not None:
            return contents.read_to(torch.device(device), tensor, verify)
        (result,) = contents.read([tensor], verify)
        return result

    @property
    def _contents(self) -> Contents:
        contents = self._open_contents
        if contents is None:
            raise ValueError(f"{self.path}: the archive is closed")
        return contents

    @cached_property
    def _names(self) -> EntryNames:
        with pausing_garbage_collection():
            return EntryNames(self._contents.obj, self.path)

    @cached_property
    def _infos(self) -> list[TensorInfo]:
        return list_tensors(self._contents, self._names)

    def _tensor(self, name: str | Path) -> Tensor:
        entry = self._names.find(name)
        if not isinstance(entry, Tensor):
            raise TypeError(
                f"{self.path}: {name!r} is no tensor, but of type {type_name_of(entry)}: read it "
                f"with archive[{name!r}]"
            )
        return entry


class TensorSlice:
    """A tensor of an archive; indexing it reads only the selected elements.

    Attributes
    ----------
    shape : torch.Size
        Shape in elements, as in :class:`TensorInfo`.
    dtype : torch.dtype
        Dtype of its elements.
    """

    def __init__(
        self, contents: Contents, tensor: Tensor, verify: bool | None, device: torch.device
    ) -> None:
        self._contents = contents
        self._device = device
        self._tensor = tensor
        self._verify = verify
        ((self.dtype, self.shape, *_),) = facts_of([tensor])

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors' slices do."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Read the part that integers, slices, ``...`` and None select; others raise TypeError."""
        check_index(index)
        return self._contents.read_slice(self._tensor, index, self._verify, self._device)


class _LazyTensors(Mapping["str | Path", Tensor]):
    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def __getitem__(self, name: str | Path) -> Tensor:
        return self._archive.get_tensor(name)

    def __iter__(self) -> Iterator[str | Path]:
        return iter(self._archive)

    def __len__(self) -> int:
        return len(self._archive)

    def __repr__(self) -> str:
        return f"<tensors of {self._archive!r}>"


def open(  # noqa: A001 - opens checkpoints as the builtin opens files
    f: Any,
    *,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    recover: bool = False,
) -> Archive:
    """Open a checkpoint to look at it, and to read parts of it.

    Opening a ``.pt`` file reads only its pickle and the directory at its end; entries are read on
    request.  No code of the file runs: only objects that :func:`torch.load` builds with
    ``weights_only=True`` are built.  Tensors are read into CPU memory.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A path, a URL for fsspec (``s3://bucket/model.pt``), or a seekable file object, which is
        read from its current position on.  A path or URL leads to a file, an index of shards, or a
        directory: of shards, of torch.distributed.checkpoint, or of one file per rank.  A file's
        content, not its name, decides how it is read.
    verify : bool, default True
        Whether to compare a storage with its CRC-32 when the whole storage is read.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    recover : bool, default False
        Whether to open the rest of a ``.pt`` or safetensors file that has lost its end, or that a
        :class:`ptsave.ArchiveWriter` has left unfinished.  A ``.pt`` file is first read whole and
        compared with its checksums.  A warning names the damaged or missing records and the
        entries that need them.  These entries are left out: items of dicts at any depth, and whole
        lists or other objects.

    Returns
    -------
    Archive
        A context manager.

    Raises
    ------
    NotCheckpointError
        If the file is not a checkpoint; the message names the file's format.
    CorruptCheckpointError
        If the file is damaged or cut short.
    pickle.UnpicklingError
        If torch's restricted unpickler cannot read the pickle.  Objects of classes that
        ``weights_only=True`` does not allow are not built.  Reading such an object raises this
        error, and the message says how to trust its class.
    OSError
        If the file cannot be read: no such file, no permission, a directory, ...

    Notes
    -----
    Some files are loaded as a whole: files of the format before torch 1.6, archives with compressed
    members, and files with sparse or quantized tensors, tensor subclasses, or another byte order.

    The safetensors library checks the header of a ``.safetensors`` file.  A whole tensor of such a
    file is mapped into memory if the page cache of a local file system holds it.  You may replace
    the file while its tensors exist, but not write into it.  Several threads read all other
    tensors.  A set with more files than a sixth of ``ulimit -n`` opens each file only while reading
    it.  If a file was replaced meanwhile, the read raises OSError.

    Opening a distributed checkpoint reads its metadata and objects.  A tensor is put together from
    the parts of all ranks when you read it; `TensorInfo.chunks` says where these parts are.  Files
    that `ptsave.distributed` wrote have a checksum for each block of 4 KiB, so slices are verified,
    too.  Files that torch wrote have a checksum for each part.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "checkpoint.pt")
    ...     ptsave.save({"model": {"weight": torch.ones(2, 3)}, "step": 7}, path)
    ...     with ptsave.open(path) as archive:
    ...         print(archive.keys(), archive["step"])
    ...         print(archive.info("model.weight").shape)
    ...         print(archive.get_slice("model.weight")[0])
    ['model.weight'] 7
    torch.Size([2, 3])
    tensor([1., 1., 1.])
    """
    check_flags(verify=verify, recover=recover)
    options = OpenOptions(storage_options, verify, recover)
    contents = open_checkpoint(f, options)
    return Archive(contents, describe(f), verify=verify)


class TensorInfo(NamedTuple):
    """Dtype, shape and place of one tensor of a file.

    Attributes
    ----------
    name : str or tuple
        As in :meth:`Archive.keys`.
    dtype : torch.dtype
        Dtype of its elements.
    shape : torch.Size
        Shape in elements.  For a nested tensor, -1 marks a dimension in which its parts differ.
    stride : tuple of int
        In elements; empty for a tensor that is nested or not strided.
    location : str or None
        The device that it was saved from, such as ``"cuda:0"``; None if the file does not say.
    nbytes : int
        Number of elements times their size.  The storage may be larger; for an expanded tensor, it
        is smaller.
    offset : int or None
        Position of its first element in the file, in bytes.  None for an empty tensor, and for
        files that can only be loaded as a whole.
    record : str or None
        The archive's record that holds its storage; None if no record does.
    shared_with : sequence of (str or tuple)
        The names of the other tensors in the same storage; it compares equal to a tuple.
    chunks : sequence of ChunkInfo
        For a directory of torch.distributed.checkpoint: the index, shape, file and place of each
        part that a rank has written.
    """

    name: str | Path
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    location: str | None
    nbytes: int
    offset: int | None
    record: str | None
    shared_with: Sequence[str | Path]
    chunks: Sequence[ChunkInfo] = ()


class _Others(Sequence["str | Path"]):
    """A group's names except one, as a view: a copy for each member would be quadratic."""

    __slots__ = ("_group", "_left_out")

    def __init__(self, group: Sequence[str | Path], left_out: int) -> None:
        self._group = group
        self._left_out = left_out

    def __len__(self) -> int:
        return len(self._group) - 1

    def __iter__(self) -> Iterator[str | Path]:
        return iter(self._as_tuple())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._as_tuple()[index]
        index = range(len(self))[index]
        return self._group[index if index < self._left_out else index + 1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Others):
            other = other._as_tuple()
        return isinstance(other, tuple) and self._as_tuple() == other

    def __hash__(self) -> int:
        return hash(self._as_tuple())

    def __repr__(self) -> str:
        return repr(self._as_tuple())

    def _as_tuple(self) -> tuple[str | Path, ...]:
        return (*self._group[: self._left_out], *self._group[self._left_out + 1 :])


def list_tensors(contents: Contents, names: EntryNames) -> list[TensorInfo]:
    """Return the `TensorInfo` of all tensors of a file, in the order of their names."""
    with pausing_garbage_collection():
        places = contents.places_of(names.tensors)
        groups: dict[object, list[str | Path]] = {}
        for name, (key, _, _, _) in zip(names.names, places, strict=True):
            groups.setdefault(key, []).append(name)
        n_met: dict[object, int] = {}  # tensors so far, by their shared storage
        infos = []
        facts_and_places = zip(facts_of(names.tensors), places, strict=True)
        for name, tensor, (facts, place) in zip(
            names.names, names.tensors, facts_and_places, strict=True
        ):
            dtype, shape, stride, begin, nbytes, _ = facts
            key, record, offset, location = place
            shared: Sequence[str | Path] = ()
            if len(groups[key]) > 1:
                number = n_met[key] = n_met.get(key, -1) + 1
                shared = _Others(groups[key], number)
            at = None if offset is None else offset + begin
            where = (location, nbytes, at, record, shared, contents.chunks_of(tensor))
            infos.append(TensorInfo(name, dtype, shape, stride, *where))
        return infos
