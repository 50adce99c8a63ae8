"""`GroupCall`: a call that all ranks of a group make; if one rank fails, all ranks raise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pickle import UnpicklingError
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from ptsave.errors import CorruptCheckpointError, UnsupportedSourceError
from ptsave.support.config import boot_id

# If another rank fails, this rank raises an error of the first of these types that fits.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (UnpicklingError, MemoryError, KeyError, TypeError, ValueError, RuntimeError)
}
# For each group, the smaller groups that `host_group` has made of its ranks.  They have open
# connections, so they are kept as long as the group itself.
_made: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
# Gloo waits this many times its timeout for a rank to connect, even if the rank has ended.
_GLOO_CONNECTS = 5
_MIN_CONNECTING = timedelta(seconds=5)


class GroupCall:
    """A collective call, seen from one rank; all ranks make the same exchanges in the same order.

    `name` is the path of the file that the call reads.  Rank 0, the reader, reads it for all ranks.
    After `divide`, each host has its own reader.  Ranks can exchange only tensors on `device`.
    """

    def __init__(self, group: Any) -> None:
        _check_group(group)
        self._group = group
        self._has_ended = False
        self.name = ""
        try:
            self.rank = distributed.get_rank(group)
            self.size = distributed.get_world_size(group)
            distributed.get_backend(group)
        except (ValueError, RuntimeError, KeyError) as error:
            raise RuntimeError(f"process_group has been destroyed ({error})") from error
        self.device = device_of_group(group)
        self._near: Any = group  # this rank's reader and the ranks that it reads for, or None
        self.is_reader = self.rank == 0
        self.is_divided = False

    def divide(self, hosts: Sequence[str]) -> None:
        """Let one rank on each host read for the ranks there; ``hosts[i]`` is rank i's host."""
        ranks = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        # A new group of these ranks will have them in this order.
        near = sorted(ranks, key=lambda rank: distributed.get_global_rank(self._group, rank))
        self._near = host_group(self._group, near) if len(near) > 1 else None
        self.is_reader = near[0] == self.rank
        self.is_divided = True

    def agree_on_contents(self, digest: Callable[[], bytes]) -> None:
        """If hosts get different digests of the file, undo `divide`: rank 0 reads for all ranks."""
        found = self.agree(digest() if self.is_divided and self.is_reader else None)
        if len({each for each in found if each is not None}) > 1:
            self._near, self.is_reader, self.is_divided = self._group, self.rank == 0, False

    def agree(self, value: Any, error: Exception | None = None) -> list[Any]:
        """Return the picklable values of all ranks; if one rank passes an `error`, all raise."""
        what = f"rank {{}} of {self.size} could not go on"
        try:
            return together(self._gather, self.rank, value, error, name=self.name, what=what)
        except Exception:
            self._has_ended = True
            raise

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with self.exchanging("exchange"):
            distributed.all_gather_object(values, value, group=self._group)
        return values

    def send(self, value: Any) -> Any:
        """Return the `value` that this rank's reader passes; other ranks' values are ignored."""
        values = [value]
        if self._near is not None:
            with self.exchanging("exchange"):
                distributed.broadcast_object_list(values, group=self._near, group_src=0)
        return values[0]

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to copy the tensor of this rank's reader into `tensor`; return a handle or None."""
        if self._near is None:
            return None
        return distributed.broadcast(tensor, group=self._near, group_src=0, async_op=True)

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """If the block fails, mark the call as ended, and name file and rank in a RuntimeError."""
        try:
            yield
        except BaseException as error:
            self._has_ended = True
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"{self.name}: rank {self.rank} of {self.size} of process_group could not go on to "
                f"{what} with the others: another rank has ended or does not answer: {error}"
            ) from error

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Send an error in the `with` block to the other ranks, unless an exchange has failed."""
        try:
            yield
        except Exception as error:
            if not self._has_ended:
                self.agree(None, error)
            raise


def agree_on_file(call: GroupCall, f: Any) -> None:
    """Set the call's name to the path `f`, and choose the readers; all ranks must pass this path.

    If the file's size and modification time are the same on all hosts, each host has a reader.
    Otherwise rank 0 reads for all ranks.
    """
    if not isinstance(f, (str, os.PathLike)):
        raise UnsupportedSourceError(
            f"process_group is for a path or a URL, not {type(f).__name__}: one rank reads the "
            "file for all ranks, so pass the same path on all ranks"
        )
    call.name = os.fsdecode(f)
    said = call.agree((call.name, host_identity(), _identity_of(call.name)))
    names, hosts, files = zip(*said, strict=True)
    if len(set(names)) > 1:
        rank = next(i for i, name in enumerate(names) if name != names[0])
        raise ValueError(
            f"{names[0]}: the ranks of process_group ask for different files: rank {rank} for the "
            f"file {names[rank]}"
        )
    if len(set(hosts)) > 1 and files[0] is not None and len(set(files)) == 1:
        call.divide(hosts)


def _identity_of(path: str) -> tuple[Any, ...] | None:
    """Return the sizes and modification times of a local file, or of a directory's files.

    Returns None if the file is missing.  Inodes are not compared, as they differ between hosts.
    """
    try:
        if not os.path.isdir(path):
            return _size_and_time(os.stat(path))
        with os.scandir(path) as entries:
            found = sorted((each.name, each) for each in entries)
            return tuple((name, *_size_and_time(each.stat())) for name, each in found)
    except (OSError, ValueError):
        return None


def _size_and_time(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _check_group(group: Any) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            "process_group needs torch.distributed.init_process_group(), which has not been called"
        )
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in process_group: only its ranks make the call")
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, such as "
            f"torch.distributed.group.WORLD or mesh.get_group(), not {type(group).__name__}"
        )


# ------------------------------------------------------------------------------- failing together


def together(
    gather: Callable[[Any], list[Any]],
    rank: int,
    value: Any = None,
    error: Exception | None = None,
    *,
    name: str,
    what: str,
) -> list[Any]:
    """Return the values of all ranks; if a rank passes an `error`, raise on every rank.

    `gather` gets this rank's value and returns all ranks' values.  A failed rank raises its own
    error.  The others raise an error of a similar type, whose message has the path `name`, and
    `what` (such as ``"rank {} could not go on"``) with the first failed rank's number for ``{}``.
    """
    said = gather((value, None if error is None else _described(error, rank)))
    for number, (_, failure) in enumerate(said):
        if failure is not None:
            raise error or _error_of_other(name, what.format(number), *failure)
    return [value for value, _ in said]


def _described(error: Exception, rank: int) -> tuple[str, str, dict[str, Any]]:
    """Return (kind, words, details) of an error that `rank` has raised, for `_error_of_other`."""
    if isinstance(error, CorruptCheckpointError):
        error.rank = rank if error.rank is None else error.rank
        names = ("path", "record", "offset", "entries", "rank")
        return "CorruptCheckpointError", str(error), {name: getattr(error, name) for name in names}
    if isinstance(error, OSError) and error.errno is not None:
        name = error.filename if isinstance(error.filename, str) else None
        return "OSError", error.strerror or str(error), {"errno": error.errno, "filename": name}
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
    return kind, f"{type(error).__name__}: {error}", {}


def _error_of_other(
    name: str, what: str, kind: str, words: str, details: dict[str, Any]
) -> Exception:
    """Return the error that this rank raises after another rank's error of this `kind`."""
    if kind == "OSError":
        return OSError(details["errno"], f"{what}: {words}", details["filename"] or name)
    message = f"{name}: {what}: {words}"
    if kind == "CorruptCheckpointError":
        return CorruptCheckpointError(message, **details)
    return _KINDS[kind](message)


# ------------------------------------------------------------------------------------- hosts


def host_identity() -> str:
    """Return a text that is the same in all processes of a host, and different on other hosts.

    The text consists of the host's name, which differs between containers, and of the boot ID.
    """
    return f"{os.uname().nodename} {boot_id()}"


def host_group(group: Any, ranks: Sequence[int]) -> Any:
    """Return a group of these `ranks` of `group`, made once, with the same backend and timeout.

    Exactly these ranks must make this call, all at the same time.
    """
    made = _made.setdefault(group, {})
    key = tuple(ranks)
    if key not in made:
        timeout = timeout_of_group(group)
        backend = distributed.get_backend_config(group)
        near = distributed.new_group(
            [distributed.get_global_rank(group, rank) for rank in ranks],
            timeout=_connecting(timeout) if "gloo" in backend else timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc="ptsave: the ranks of a host",
        )
        if timeout is not None and "gloo" in backend:
            distributed_c10d._set_pg_timeout(timeout, near)
        made[key] = near
    return made[key]


def _connecting(timeout: timedelta | None) -> timedelta | None:
    """Return a timeout to pass to gloo, which waits `_GLOO_CONNECTS` times that long to connect."""
    if timeout is None:
        return None
    return max(timeout / _GLOO_CONNECTS, min(timeout, _MIN_CONNECTING))


def device_of_group(group: Any) -> torch.device:
    """Return the device on which a process group exchanges tensors: the CPU if possible.

    Raises a RuntimeError if this process has no such device.
    """
    kinds = [device.type for device in group._device_types]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    try:
        return torch.empty(0, device=kinds[0]).device  # the current device of that kind
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RuntimeError(
            f"process_group exchanges tensors on devices of type {kinds[0]}, but this process "
            "cannot make tensors there: pass a group that can use the CPU, such as "
            f'torch.distributed.new_group(backend="gloo") ({error})'
        ) from error


def timeout_of_group(group: Any) -> timedelta | None:
    """Return how long a process group waits for its ranks; None if that is unknown."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None
