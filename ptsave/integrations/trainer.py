"""Checkpoints of transformers' Trainer by ptsave."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ptsave.installation import installed
from ptsave.integrations.staged_folders import FolderSaves, StagedFolder, writes_in_background

__all__ = ["CheckpointMixin"]

_PREFIX = "checkpoint"
_STATE_NAME = "trainer_state.json"


class CheckpointMixin:
    """Saves and loads all of a Trainer's checkpoints by ptsave: model, optimizer, scheduler, RNG.

    ``class MyTrainer(CheckpointMixin, transformers.Trainer)``; or take
    :class:`ptsave.integrations.transformers.Trainer`, which is just that.

    * Everything that the Trainer writes with torch or safetensors goes through the engine: the same
      files, which ``from_pretrained`` and a stock Trainer read.
    * ``checkpoint-<step>`` is complete, or not there: it is written under another name and renamed
      when all its files are.  A killed process leaves ``.checkpoint-<step>.ptsave``, which the next
      one removes.
    * Loading compares checksums (of the files that have any: not of safetensors).
    * Older checkpoints are removed (``save_total_limit``) when the new one has its name.

    Parameters
    ----------
    *args : object
        For the Trainer.
    async_checkpoints : bool, default False
        Whether training goes on while the files are written: the call copies the tensors.  Its
        errors are raised by the next checkpoint, or at the end of ``train()``; until then the
        directory may not have its name, also not in the callback ``on_save``.
    fsync_checkpoints : bool, default False
        Whether a checkpoint survives power loss when it gets its name.
    **kwargs : object
        For the Trainer.

    Notes
    -----
    Files that DeepSpeed, FSDP and XLA write by themselves are theirs; the directory is renamed when
    they have.  All ranks have to see the same file system, or each node its own
    (``save_on_each_node``).

    Examples
    --------
    >>> from ptsave.integrations.transformers import Trainer  # doctest: +SKIP
    >>> trainer = Trainer(model, args, train_dataset=data, async_checkpoints=True)  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
    """

    accelerator: Any
    args: Any
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
        # Where the Trainer makes the directory of the checkpoint that is being written.
        self._staged_run_dir: str | None = None
        if async_checkpoints and self.args.world_size > 1:
            raise ValueError(
                "async_checkpoints=True is for one process: with several, no rank knows when the "
                "others have written their files"
            )

    # -------------------------------------------------------------------------------------- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, so that ``from_pretrained`` reads it."""
        with self._engine():
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._saves.check()
        run_dir = self._get_output_dir(trial)
        name = f"{_PREFIX}-{self.state.global_step}"
        folder = StagedFolder(os.path.join(run_dir, name), fsync=self._fsync)
        if self.args.should_save:
            self._saves.remove_leftovers(run_dir, f"{_PREFIX}-")
        self.accelerator.wait_for_everyone()
        try:
            with self._writing(folder) as futures:
                self._staged_run_dir = folder.root
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
        except BaseException:
            folder.discard()
            raise
        finally:
            self._staged_run_dir = None
        self._name_best_checkpoint(folder, os.path.join(run_dir, name))
        self.accelerator.wait_for_everyone()  # all have written their files
        if self.args.should_save:
            self._saves.commit(folder, futures, self._rotation(run_dir))
        if self.args.push_to_hub:
            self._saves.wait()
            super()._push_from_checkpoint(folder.final)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()

    @contextmanager
    def _writing(self, folder: StagedFolder) -> Iterator[list[Any]]:
        if self._in_background:
            with writes_in_background(folder, fsync=self._fsync) as futures:
                yield futures
        else:
            with self._engine():
                yield []

    def _engine(self) -> AbstractContextManager[None]:
        return installed(safetensors=True, fsync=self._fsync or None)

    def _get_output_dir(self, trial: Any) -> str:
        if self._staged_run_dir is not None:
            return self._staged_run_dir
        directory: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return directory

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing yet: the folder is pushed when it has its name."""

    def _name_best_checkpoint(self, folder: StagedFolder, final: str) -> None:
        """Note the name that the best checkpoint will have, if this is it."""
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
        """Train; parameters as of ``transformers.Trainer.train``.

        Raises
        ------
        SaveError
            If a checkpoint could not be written in the background.
        """
        self._saves.wait()  # of an earlier call: this one may resume from it
        if self.args.should_save:
            self._saves.restore_names(self.args.output_dir, f"{_PREFIX}-")
        result = super().train(*args, **kwargs)  # type: ignore[misc]
        self._saves.check()
        return result

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._saves.settle()  # the best one is loaded, and older ones are removed
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._engine():
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with self._engine():
            super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._engine():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        with self._engine():
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._engine():
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
