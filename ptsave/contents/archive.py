"""`ptsave.open`: a checkpoint whose tensors are read only on request.

torch's restricted unpickler builds the saved object once, with tensors that have no memory.  ptsave
uses these tensors only internally.  To read a part of a tensor, the archive indexes the tensor
without memory; the strides of the result show which bytes of the file to read.  A record of a
``.pt`` file has one checksum, so a part of a record cannot be verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
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
    """An open checkpoint, which :func:`ptsave.open` returns.

    Several threads may use an archive at the same time.  If one thread closes the archive while
    another thread reads, the read still completes.

    Attributes
    ----------
    path : str
        The checkpoint's path, URL or other name, as error messages show it.
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
        self._contents  # noqa: B018 - raises if the archive is closed
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ptsave.Archive {self.path!r}{' (closed)' if self.closed else ''}>"

    @property
    def metadata(self) -> dict[str, str]:
        """The format and version of a ``.pt`` file, or the metadata of a safetensors file."""
        return dict(self._contents.metadata)

    def keys(self) -> list[str | Path]:
        """Return the names of all tensors, in the order in which the saved object has them.

        A name is the path to the tensor: keys of dicts, and indexes of lists and tuples, joined
        with dots.  If tensors would get the same name, the name of each such tensor is the tuple of
        its keys and indexes.  If the saved object is itself a tensor, the tensor's name is ``""``.
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
        """Return the dtype, shape, strides and file position of a tensor; no values are read.

        Raises
        ------
        KeyError
            If no entry has this name, or if the name could mean several entries.
        TypeError
            If the entry is not a tensor.
        """
        tensor = self._tensor(name)
        number = self._names.number_of(name, tensor)
        return self._infos[number]

    def infos(self) -> list[TensorInfo]:
        """Return the `TensorInfo` of each tensor, in the order of `keys`."""
        return list(self._infos)

    def __getitem__(self, name: str | Path) -> Any:
        """Return the saved value with this name, after reading all tensors in it."""
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

        Only the bytes from the tensor's first to its last element are read.  The result has its own
        memory, unless opening loaded the whole file.  It keeps the saved strides unless they would
        leave gaps in this memory.

        Parameters
        ----------
        name : str or tuple
            One of the names that `keys` returns.
        device : torch.device or str, optional
            Target device: the CPU by default, even if the tensor was saved from another device.
        verify : bool, optional
            Whether to compare the tensor's whole storage with its checksum.  With True, the whole
            storage is read for this.  By default, this is done only if the whole storage is needed.
        map_location : torch.device or str, optional
            Another name for `device`.

        Raises
        ------
        KeyError
            If no entry has this name, or if the name could mean several entries.
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
        """Return an object for one tensor; indexing the object reads only the selected part.

        Parameters
        ----------
        name : str or tuple
            One of the names that `keys` returns.
        device : torch.device or str, optional
            Device for the parts that are read: the CPU by default.
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
        """Return a mapping from names to tensors; each access reads the tensor from the file."""
        return _LazyTensors(self)

    def verify(self, *, progress: bool = False) -> None:
        """Read all data of the file, and compare the data with the checksums in the file.

        The call does not keep the data, so it needs little memory.  For a safetensors file,
        ValueError is raised, because such a file has no checksums.

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
        """Return the module calls that :func:`ptsave.capture` has recorded; no tensor is read.

        If the process was killed during the capture, open the file with ``recover=True``.  Then
        only calls with complete records are returned, and the parent of such a call may be missing.

        Returns
        -------
        list of CapturedCall
            The calls, in the order in which they began.  `CapturedCall.values` describes arguments,
            results and gradients by dtype, shape and statistics; `tensor` reads their elements.

        Raises
        ------
        ValueError
            If the file is not a capture, or if a later version of ptsave wrote it.
        CorruptCheckpointError
            If the records of the capture are damaged.

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
        """Return the values (arguments, gradients, ...) that a capture recorded, in time order.

        Parameters
        ----------
        phase : str, optional
            Select only parameters (``"params"``), only their gradients (``"grads"``), or values of
            calls (``"forward"``, ``"backward"``, ``"recompute"``, ``"recompute_backward"``).
        step : int, optional
            Select only the values of the step with this number.  By default, all are returned.

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
        """Count a capture's calls and values, in total and by module class; no tensor is read.

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
                f"{self.path}: {name!r} is not a tensor, but of type {type_name_of(entry)}: read "
                f"it with archive[{name!r}]"
            )
        return entry


class TensorSlice:
    """A tensor of an archive; indexing it reads only the selected elements.

    Attributes
    ----------
    shape : torch.Size
        Shape of the whole tensor.  For a nested tensor, -1 marks a dimension whose size varies.
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
        """Return the shape as a list; the safetensors library has the same method."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Read the part that `index` selects: integers, slices, ``...`` and None are allowed."""
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
    map: bool = False,  # noqa: A002 - named like the `mmap` of loads
) -> Archive:
    """Open a checkpoint to look at it, and to read parts of it.

    Opening a ``.pt`` file reads only its pickle and the zip directory at the file's end; tensors
    are read on request.  No code of the file runs: only objects that :func:`torch.load` builds with
    ``weights_only=True`` are built.  By default, tensors are read into CPU memory.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A path, a URL for fsspec (``s3://bucket/model.pt``), or a seekable file object, which is
        read from its current position on.  A path or URL may name a file, an index of shards, or a
        directory that holds shards, a checkpoint of torch.distributed.checkpoint, or one file per
        rank.  The content of a file, not the name, decides how the file is read.
    verify : bool, default True
        Whether to compare a storage with its CRC-32 when the whole storage is read.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    recover : bool, default False
        Whether to open the readable part of a ``.pt`` or safetensors file whose end is missing, or
        which a :class:`ptsave.ArchiveWriter` has not completed.  With True, opening first compares
        all data of a ``.pt`` file with its checksums.  A warning names the damaged or missing
        records, and the entries that need them.  Such entries are left out: a dict at any depth
        loses only the damaged items, but a list or another object is left out completely.
    map : bool, default False
        Whether to map a ``.pt`` or safetensors file at a local path.  Its tensors are then views of
        the map, which take no memory of their own.  The first time that a tensor is handed out, it
        is compared with its CRC-32, if it has one: in a ``.pt`` file, the whole record is compared.
        :meth:`Archive.verify` and :func:`ptsave.verified` compare all records or tensors.

    Returns
    -------
    Archive
        The open checkpoint, a context manager.

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
        If the file does not exist or cannot be read, or a directory holds no checkpoint.
    ValueError
        With `map`, if the file cannot be mapped: a URL, a file object, another format, `recover`.

    Notes
    -----
    Opening loads some files completely: files in the format before torch 1.6, compressed files, and
    files with sparse or quantized tensors, tensor subclasses, or another byte order than the CPU's.

    The safetensors library checks the header of a ``.safetensors`` file.  A whole tensor of such a
    file is mapped into memory if the page cache of a local file system holds the tensor's bytes.
    Several threads read all other tensors.  You may replace the file while mapped tensors exist,
    but you must not write into the file.

    If a checkpoint has more than (``ulimit -n``) / 6 files, each file is open only while it
    is read.  If such a file is replaced between two reads, the second read raises OSError.

    Opening a distributed checkpoint reads its metadata and all objects that are not tensors.  When
    you read a tensor, ptsave joins the parts that the ranks wrote; `TensorInfo.chunks` says where
    these parts are.  Files that `ptsave.distributed` wrote have a checksum for each block of 4 KiB,
    so slices are verified, too.  Files that torch wrote have one checksum for each part.

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
    check_flags(verify=verify, recover=recover, map=map)
    options = OpenOptions(storage_options, verify, recover)
    if map:
        from ptsave.contents.mapped import open_map

        if recover or not isinstance(f, (str, PathLike)):
            raise ValueError(f"{describe(f)}: map=True takes the path of a whole file")
        options = options._replace(open_map=open_map)
    contents = open_checkpoint(f, options)
    return Archive(contents, describe(f), verify=verify)


class TensorInfo(NamedTuple):
    """Dtype, shape and position of one tensor in a file.

    Attributes
    ----------
    name : str or tuple
        One of the names that :meth:`Archive.keys` returns.
    dtype : torch.dtype
        Dtype of its elements.
    shape : torch.Size
        Shape in elements.  For a nested tensor, -1 marks a dimension whose size varies.
    stride : tuple of int
        Strides in elements; empty for a tensor that is nested or not strided.
    location : str or None
        The device that the tensor was saved from, such as ``"cuda:0"``; None if unknown.
    nbytes : int
        Number of elements times the size of an element.  The storage of the tensor may be larger,
        or smaller if the tensor is expanded.
    offset : int or None
        Position of the first element in the file, in bytes.  None in a distributed checkpoint, in a
        file that opening loads completely, and for an empty tensor of a ``.pt`` file.
    record : str or None
        Name of the archive's record that has the tensor's storage; None if no record has it.
    shared_with : sequence of (str or tuple)
        The names of the other tensors in the same storage; may be compared with a tuple by ``==``.
    chunks : sequence of ChunkInfo
        In a checkpoint of torch.distributed.checkpoint: the index, shape, file and position of each
        part that a rank has written.  Empty for other checkpoints.
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
    """All names of a group except one; not a copy, because many copies would take much memory."""

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
    """Return the `TensorInfo` of each tensor of a checkpoint, in the order of `names`."""
    with pausing_garbage_collection():
        places = contents.places_of(names.tensors)
        groups: dict[object, list[str | Path]] = {}
        for name, (key, _, _, _) in zip(names.names, places, strict=True):
            groups.setdefault(key, []).append(name)
        n_met: dict[object, int] = {}  # by storage: position of the last tensor met in its group
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
