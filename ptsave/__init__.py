"""torch.save and torch.load at the speed of the hardware: the same files, byte for byte."""

from ptsave import _torch_version as _torch_version  # first: refuses a torch it was not built for
from ptsave.archive import Archive, open  # noqa: A004 - named as Python's
from ptsave.archive_listing import TensorInfo
from ptsave.asynchronous import async_save, release_staging_memory
from ptsave.checkpoint import load_checkpoint, load_into, save_checkpoint
from ptsave.checkpointer import AsyncCheckpointer
from ptsave.errors import (
    CheckpointWarning,
    CorruptCheckpointError,
    NotCheckpointError,
    SaveError,
    StagingFullError,
    UnsupportedUrlError,
)
from ptsave.installation import install, installed, uninstall
from ptsave.lazy_buffers import register_lazy_buffer
from ptsave.module_state import IncompatibleKeys, load_state_dict
from ptsave.optimizer_groups import UnmatchedParameters
from ptsave.optimizer_state import load_optimizer_state_dict
from ptsave.prefixes import add_prefix, strip_prefix
from ptsave.save_future import SaveFuture
from ptsave.serialization import load, save
from ptsave.sharded_saving import save_model
from ptsave.weight_plan import LoadedWeights
from ptsave.weights import load_model

__version__: str = _torch_version.VERSION

__all__ = [
    "Archive",
    "AsyncCheckpointer",
    "CheckpointWarning",
    "CorruptCheckpointError",
    "IncompatibleKeys",
    "LoadedWeights",
    "NotCheckpointError",
    "SaveError",
    "SaveFuture",
    "StagingFullError",
    "TensorInfo",
    "UnmatchedParameters",
    "UnsupportedUrlError",
    "__version__",
    "add_prefix",
    "async_save",
    "install",
    "installed",
    "load",
    "load_checkpoint",
    "load_into",
    "load_model",
    "load_optimizer_state_dict",
    "load_state_dict",
    "open",
    "register_lazy_buffer",
    "release_staging_memory",
    "save",
    "save_checkpoint",
    "save_model",
    "strip_prefix",
    "uninstall",
]
