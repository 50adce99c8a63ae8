"""Lets transformers' Trainer save and load with ptsave: a mixin, and a Trainer that uses it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ptsave.background.save_future import SaveFuture
from ptsave.installation import installed
from ptsave.integrations.accelerate import raised_on_all
from ptsave.integrations.lazy_classes import classes_over
from ptsave.integrations.staged_folders import (
    FolderParts,
    FolderSaves,
    StagedFolder,
    give_up,
    writes_in_background,
)
from ptsave.support import config

__all__ = ["CheckpointMixin", "Trainer"]

_PREFIX = "checkpoint"
_STATE_NAME = "trainer_state.json"


def _calling_in(context: str, name: str) -> Any:
    """Return a method that calls the Trainer's method `name` within the mixin's `context`."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with getattr(self, context)():
            return getattr(super(CheckpointMixin, self), name)(*args, **kwargs)

    return method


class CheckpointMixin:
    """Saves and loads a Trainer's checkpoints with ptsave: model, optimizer, scheduler, RNG.

    Use it as ``class MyTrainer(CheckpointMixin, transformers.Trainer)``, or use
    :class:`ptsave.integrations.transformers.Trainer`, which is the same.

    * ptsave writes all that the Trainer would write with torch or safetensors, into the same files.
      ``from_pretrained`` and a stock Trainer can read them.
    * ``checkpoint-<step>`` is complete or absent: it gets its name when all its files are written.
      A killed process leaves ``.checkpoint-<step>.ptsave``, which the next process removes.
    * Loading verifies checksums, which safetensors files do not have.
    * Older checkpoints are removed (``save_total_limit``) when the new one has its name.
    * If two programs write the same checkpoint, the second one raises an error.
    * If one rank fails, all ranks raise an error that quotes the failure.  No rank waits forever.

    Parameters
    ----------
    *args : object
        Arguments of the Trainer.
    async_checkpoints : bool, default False
        Whether training goes on while the files are written: the call only copies the tensors.  The
        next checkpoint, or the end of ``train()``, raises the error of a failed write.  The
        directory gets its name when all ranks have written their files, which may be after the
        callback ``on_save``.  Ranks report to each other through locked files beside the directory.
    fsync_checkpoints : bool, default False
        Whether a checkpoint survives power loss when it gets its name.
    **kwargs : object
        Arguments of the Trainer.

    Notes
    -----
    DeepSpeed and XLA write some files themselves; the directory is renamed after that.  Files that
    FSDP writes with ``torch.distributed.checkpoint`` go through :mod:`ptsave.distributed`, and are
    written before the call returns.  All ranks must see the same file system; with
    ``save_on_each_node``, only the ranks of one node must share it.

    Examples
    --------
    >>> from ptsave.integrations.transformers import Trainer  # doctest: +SKIP
    >>> trainer = Trainer(model, args, train_dataset=data, async_checkpoints=True)  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
    """

    accelerator: Any
    args: Any
    is_fsdp_enabled: bool
    state: Any

    def __init__(
        self,
        *args: Any,
        async_checkpoints: bool = False,
        fsync_checkpoints: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._in_background = async_checkpoints
        self._fsync = fsync_checkpoints
        self._saves = FolderSaves()
        # The directory in which the Trainer is making a checkpoint, or None.
        self._staged_run_dir: str | None = None
        # Errors in the steps of writing that checkpoint, if there are several ranks.
        self._step_errors: list[Exception] | None = None

    # -------------------------------------------------------------------------------------- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model in files that ``from_pretrained`` can read."""
        with self._engine(), self._step():
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    _save_optimizer_and_scheduler = _calling_in("_step", "_save_optimizer_and_scheduler")
    _save_scaler = _calling_in("_step", "_save_scaler")
    _save_rng_state = _calling_in("_step", "_save_rng_state")

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Keep the block's error until all steps are done: other ranks may wait in a later step."""
        try:
            yield
        except Exception as error:
            if self._step_errors is None:
                raise
            self._step_errors.append(error)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = self._get_output_dir(trial)
        name = f"{_PREFIX}-{self.state.global_step}"
        folder = StagedFolder(os.path.join(run_dir, name), fsync=self._fsync)
        futures: list[SaveFuture] = []
        parts: FolderParts | None = None
        self._check_saves()
        try:
            with raised_on_all(self.accelerator, folder.final):
                # An earlier checkpoint of that name may be pending.
                self._saves.settle(lambda each: each.final == folder.final)
                folder.check_name()
                if self.args.should_save:
                    for leftover in self._saves.leftovers(run_dir, f"{_PREFIX}-"):
                        leftover.discard_leftover()
                    folder.claim()
            with raised_on_all(self.accelerator, folder.final):
                parts = self._parts_of(folder)
                with self._writing(folder, futures):
                    self._write(folder, model, trial)
                self._name_best_checkpoint(folder, os.path.join(run_dir, name))
            with raised_on_all(self.accelerator, folder.final):  # all ranks have written or begun
                if self.args.should_save:
                    self._saves.commit(folder, futures, self._rotation(run_dir), parts)
                elif parts is not None:
                    self._saves.tell(folder, futures, parts)
        except BaseException as error:
            give_up(futures)
            if isinstance(error, Exception):
                with suppress(RuntimeError):  # if a rank has ended
                    self.accelerator.wait_for_everyone()  # then no rank writes into the folder
            if folder.is_claimed:
                folder.discard()
            raise
        if self.args.push_to_hub:
            self._saves.settle()  # this rank's writes; the next call waits for all ranks
            self._check_saves()
            super()._push_from_checkpoint(folder.final)  # type: ignore[misc]

    def _write(self, folder: StagedFolder, model: Any, trial: Any) -> None:
        """Let the Trainer write its checkpoint into `folder`, or begin to write it."""
        self._staged_run_dir = folder.root
        self._step_errors = [] if self.accelerator.num_processes > 1 else None
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            for error in self._step_errors or ():
                raise error
        finally:
            self._staged_run_dir = self._step_errors = None

    def _parts_of(self, folder: StagedFolder) -> FolderParts | None:
        """If several ranks write in the background, return their `FolderParts`; otherwise None."""
        if not self._in_background or self.accelerator.num_processes == 1:
            return None
        if self.args.save_on_each_node:
            size = config.local_world_size()
            return FolderParts(folder, self.args.local_process_index, size) if size > 1 else None
        return FolderParts(folder, self.args.process_index, self.args.world_size)

    def _check_saves(self) -> None:
        """If an earlier checkpoint failed on any rank, raise the error on all ranks."""
        try:
            with raised_on_all(self.accelerator, self.args.output_dir):
                self._saves.check()
        except Exception:
            self._saves.forget_failures()  # another rank's error caused these errors
            raise

    @contextmanager
    def _writing(self, folder: StagedFolder, futures: list[SaveFuture]) -> Iterator[None]:
        """Let the engine write what the block saves; add unfinished saves to `futures`."""
        with self._engine():
            if not self._in_background:
                yield
                return
            with writes_in_background(folder, fsync=self._fsync) as begun:
                yield
        futures.extend(begun)

    def _engine(self) -> AbstractContextManager[None]:
        """Return a context manager that installs ptsave; with FSDP, DCP checkpoints, too."""
        return installed(
            safetensors=True, distributed=self.is_fsdp_enabled or None, fsync=self._fsync or None
        )

    def _get_output_dir(self, trial: Any) -> str:
        if self._staged_run_dir is not None:
            return self._staged_run_dir
        directory: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return directory

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the folder is pushed later, when it has its name."""

    def _name_best_checkpoint(self, folder: StagedFolder, final: str) -> None:
        """If `folder` is the best checkpoint, record its final name in the Trainer's state."""
        best = self.state.best_model_checkpoint
        if best is None or os.path.abspath(best) != folder.path:
            return
        self.state.best_model_checkpoint = final
        if self.args.should_save:
            self.state.save_to_json(os.path.join(folder.path, _STATE_NAME))

    def _rotation(self, run_dir: str) -> Callable[[], object]:
        """Return a function that removes older checkpoints, as the Trainer does."""
        from transformers.trainer_utils import rotate_checkpoints

        return functools.partial(
            rotate_checkpoints,
            output_dir=run_dir,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    # ------------------------------------------------------------------------------------ resuming

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``transformers.Trainer.train``, which has the same parameters.

        Raises
        ------
        SaveError
            If a checkpoint could not be written in the background.
        """
        self._saves.settle()  # this call may resume from an earlier call's checkpoint
        if self.args.should_save:
            for leftover in self._saves.leftovers(self.args.output_dir, f"{_PREFIX}-"):
                leftover.restore()
        self._check_saves()
        result = super().train(*args, **kwargs)  # type: ignore[misc]
        self._check_saves()
        return result

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._saves.settle()  # the Trainer loads the best checkpoint, and removes older ones
        self.accelerator.wait_for_everyone()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    _load_from_checkpoint = _calling_in("_engine", "_load_from_checkpoint")
    _load_best_model = _calling_in("_engine", "_load_best_model")
    _load_optimizer_and_scheduler = _calling_in("_engine", "_load_optimizer_and_scheduler")
    _load_scaler = _calling_in("_engine", "_load_scaler")
    _load_rng_state = _calling_in("_engine", "_load_rng_state")


Trainer = CheckpointMixin
__getattr__ = classes_over(
    __name__, {"Trainer": "transformers.Trainer"}, package="transformers accelerate"
)
