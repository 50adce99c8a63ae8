"""Lets the ``save_state`` and ``load_state`` of an accelerate Accelerator use ptsave."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ptsave.errors import CorruptCheckpointError, SaveError
from ptsave.installation import installed
from ptsave.integrations.staged_folders import StagedFolder, in_place_of, staged_folders_in

__all__ = ["disable", "enable"]

_NUMBERED = re.compile(r"checkpoint_([0-9]+)")


def enable(accelerator: Any, *, fsync: bool = False) -> Any:
    """Let an Accelerator save and load its states with ptsave; `disable` undoes this.

    ptsave writes and reads models, optimizers, schedulers, samplers, random states and custom
    objects, in the same files as accelerate.  The directory of a checkpoint is complete or absent.
    Loading verifies checksums, which safetensors files do not have.  Hooks of the Accelerator get a
    temporary directory as ``output_dir``, whose path ends with the checkpoint's name.  When all
    files are written, ptsave renames this directory.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        The object whose methods ``save_state`` and ``load_state`` are replaced.
    fsync : bool, default False
        Whether a checkpoint survives power loss when ``save_state`` returns.

    Returns
    -------
    accelerate.Accelerator
        The same object.

    Notes
    -----
    With automatic naming (``total_limit``), ptsave removes an older checkpoint after the new one is
    complete; accelerate itself removes it before.  If the file of random states is damaged, ptsave
    raises an error; accelerate itself continues without the file.

    ``save_state`` into an existing directory keeps the directory's other files (notes, logs), as
    accelerate does: ptsave moves them into the new directory.  Some directories cannot be
    renamed: a mount point, a directory whose parent is not writable, or a directory that contains
    the main process's current directory (``save_state(".")``).  The main process moves the files
    into such a directory one by one.  If the process is killed meanwhile, the next ``load_state``
    or ``save_state`` with this directory moves the rest.
    If two programs save into one directory at the same time, the second one raises an error.

    DeepSpeed and Megatron write some files themselves, without ptsave.  Files that FSDP writes with
    ``torch.distributed.checkpoint`` go through :mod:`ptsave.distributed`.  All processes must see
    the same file system.  An error of one process is raised on all processes.

    Examples
    --------
    >>> import accelerate  # doctest: +SKIP
    >>> from ptsave.integrations.accelerate import enable  # doctest: +SKIP
    >>> accelerator = enable(accelerate.Accelerator())  # doctest: +SKIP
    >>> accelerator.save_state("step-100")  # doctest: +SKIP
    """
    disable(accelerator)
    accelerator.save_state = functools.partial(_save_state, accelerator, fsync)
    accelerator.load_state = functools.partial(_load_state, accelerator)
    return accelerator


def disable(accelerator: Any) -> None:
    """Restore an Accelerator's own methods."""
    for name in ("save_state", "load_state"):
        vars(accelerator).pop(name, None)


def _save_state(
    accelerator: Any,
    fsync: bool,
    output_dir: str | os.PathLike[str] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    project = accelerator.project_configuration
    is_named = project.automatic_checkpoint_naming
    if is_named:
        directory = _directory_of(accelerator)
        output_dir = os.path.join(directory, f"checkpoint_{accelerator.save_iteration}")
        if os.path.exists(output_dir):
            raise ValueError(
                f"Checkpoint directory {output_dir} ({accelerator.save_iteration}) already exists. "
                "Please manually override `self.save_iteration` with what iteration to start with."
            )
    if output_dir is None or not os.fspath(output_dir):
        # Raises accelerate's own error.
        return type(accelerator).save_state(accelerator, output_dir, *args, **kwargs)
    final = os.path.expanduser(os.fspath(output_dir))
    folder = StagedFolder(final, fsync=fsync, keeps_others=True, above=is_named)
    try:
        with raised_on_all(accelerator, final):
            folder.check_name()
            if accelerator.is_main_process:
                if is_named:
                    _remove_leftovers(directory)
                folder.claim()
                os.makedirs(os.path.dirname(folder.final), exist_ok=True)
        project.automatic_checkpoint_naming = False
        with raised_on_all(accelerator, final), _engine(accelerator, fsync=fsync or None):
            result = type(accelerator).save_state(accelerator, folder.path, *args, **kwargs)
        with raised_on_all(accelerator, final):  # all ranks have written their files
            if accelerator.is_main_process:
                folder.publish()
    except BaseException:
        if folder.is_claimed:
            folder.discard()
        raise
    finally:
        project.automatic_checkpoint_naming = is_named
    if is_named and accelerator.is_main_process:
        # Other ranks do not wait while the oldest checkpoints are removed.
        matches = map(_NUMBERED.fullmatch, os.listdir(directory))
        numbered = sorted((int(match[1]), match[0]) for match in matches if match)
        limit = len(numbered) if project.total_limit is None else project.total_limit
        for _, name in numbered[: max(len(numbered) - limit, 0)]:
            shutil.rmtree(os.path.join(directory, name))
    return Path(final) if isinstance(result, Path) else result


def _directory_of(accelerator: Any) -> str:
    """Return the directory of automatically named checkpoints."""
    return os.path.join(accelerator.project_dir, "checkpoints")


def _remove_leftovers(directory: str) -> None:
    """Remove the temporary directories of killed saves; accelerate counts them as checkpoints."""
    parent, name = os.path.split(os.path.realpath(directory))
    for folder in (
        *staged_folders_in(os.path.realpath(directory), "checkpoint_", keeps_others=True),
        *staged_folders_in(parent, f"{name}.checkpoint_"),
    ):
        folder.discard_leftover()


def _engine(accelerator: Any, *, fsync: bool | None = None) -> AbstractContextManager[None]:
    """Return a context manager that installs ptsave; with FSDP, distributed checkpoints, too."""
    is_sharded = accelerator.distributed_type == "FSDP"
    return installed(safetensors=True, distributed=is_sharded or None, fsync=fsync)


def _load_state(
    accelerator: Any, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any
) -> Any:
    if input_dir is not None:
        final = os.path.expanduser(os.fspath(input_dir))
        folder = StagedFolder(final, fsync=False, keeps_others=True)
        with raised_on_all(accelerator, final):
            if accelerator.is_main_process:
                folder.complete()
        input_dir = folder.left_behind() or input_dir
    elif accelerator.project_configuration.automatic_checkpoint_naming:
        directory = _directory_of(accelerator)
        with raised_on_all(accelerator, directory):  # accelerate could load a leftover
            if accelerator.is_main_process:
                _remove_leftovers(directory)
    with _engine(accelerator), _remembering_damage():
        return type(accelerator).load_state(accelerator, input_dir, *args, **kwargs)


@contextmanager
def _remembering_damage() -> Iterator[None]:
    """After the block, raise the first CorruptCheckpointError of ``torch.load`` that it caught."""
    load, errors = torch.load, list[CorruptCheckpointError]()

    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except CorruptCheckpointError as error:
            errors.append(error)
            raise

    with in_place_of(load, noting):
        yield
    if errors:
        raise errors[0]


@contextmanager
def raised_on_all(accelerator: Any, place: str) -> Iterator[None]:
    """Run the block on all ranks, and wait for them; if one rank raises an error, all ranks do.

    The other ranks raise a SaveError that quotes the error and names `place`.  KeyboardInterrupt
    and SystemExit leave the block without waiting for other ranks.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    texts = _of_all(accelerator, None if own is None else f"{type(own).__name__}: {own}")
    failed = [rank for rank, each in enumerate(texts) if each is not None]
    if not failed:
        return
    with suppress(RuntimeError):  # so that no rank exits before the others have its message
        accelerator.wait_for_everyone()
    if own is not None:
        raise own
    rank = failed[0]
    raise SaveError(f"{place}: rank {rank} could not complete the checkpoint: {texts[rank]}")


def _of_all(accelerator: Any, text: str | None) -> list[str | None]:
    """Return the texts of all ranks, in the order of the ranks."""
    n_ranks = accelerator.num_processes
    if n_ranks == 1:
        return [text]
    utils: Any = importlib.import_module("accelerate.utils")
    if accelerator.distributed_type == utils.DistributedType.XLA:  # XLA gathers only tensors
        return [utils.broadcast_object_list([text], rank)[0] for rank in range(n_ranks)]
    return list(utils.gather_object([text]))
