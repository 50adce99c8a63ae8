"""Everything that users import from ptsave, which `ptsave` itself has once it is asked for it."""

import ptsave.support.torch_version  # noqa: F401 - first: it may refuse the torch

# isort: split
from ptsave.appending.archive_writer import ArchiveWriter
from ptsave.background.async_save import async_save, release_staging_memory
from ptsave.background.save_future import SaveFuture
from ptsave.capturing.capture import Capture, capture
from ptsave.comparison.captures import (
    CaptureComparison,
    CapturedDifference,
    compare_captures,
)
from ptsave.comparison.compare import Comparison, compare
from ptsave.contents.archive import Archive, open  # noqa: A004 - named as Python's
from ptsave.contents.tensor_info import TensorInfo
from ptsave.conversion.compacting import Compaction, compact
from ptsave.conversion.converting import Conversion, convert
from ptsave.errors import (
    CheckpointWarning,
    CorruptCheckpointError,
    EntryNotFoundError,
    NotCheckpointError,
    SaveError,
    StagingFullError,
    UnsupportedSourceError,
    UnsupportedUrlError,
)
from ptsave.installation import install, installed, uninstall
from ptsave.models.default_loader import default_weight_loader
from ptsave.models.iterating import iter_weights
from ptsave.models.load_model import load_model
from ptsave.models.save_model import save_model
from ptsave.models.weight_plan import LoadedWeights
from ptsave.models.weight_slices import WeightSlice
from ptsave.serialization import load, save
from ptsave.state.lazy_buffers import register_lazy_buffer
from ptsave.state.modules import IncompatibleKeys, load_state_dict
from ptsave.state.optimizer_groups import UnmatchedParameters
from ptsave.state.optimizers import load_optimizer_state_dict
from ptsave.state.prefixes import add_prefix, strip_prefix
from ptsave.state.unsaved import unsaved_tensors
from ptsave.training.checkpoint import load_checkpoint, load_into, save_checkpoint
from ptsave.training.checkpointer import AsyncCheckpointer
from ptsave.training.restored import RestoredEntries
from ptsave.tree.capture_schema import CapturedCall, CapturedValue
from ptsave.tree.captured_summary import CaptureSummary

__all__ = [
    "Archive",
    "ArchiveWriter",
    "AsyncCheckpointer",
    "Capture",
    "CaptureComparison",
    "CaptureSummary",
    "CapturedCall",
    "CapturedDifference",
    "CapturedValue",
    "CheckpointWarning",
    "Compaction",
    "Comparison",
    "Conversion",
    "CorruptCheckpointError",
    "EntryNotFoundError",
    "IncompatibleKeys",
    "LoadedWeights",
    "NotCheckpointError",
    "RestoredEntries",
    "SaveError",
    "SaveFuture",
    "StagingFullError",
    "TensorInfo",
    "UnmatchedParameters",
    "UnsupportedSourceError",
    "UnsupportedUrlError",
    "WeightSlice",
    "add_prefix",
    "async_save",
    "capture",
    "compact",
    "compare",
    "compare_captures",
    "convert",
    "default_weight_loader",
    "install",
    "installed",
    "iter_weights",
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
    "unsaved_tensors",
]
