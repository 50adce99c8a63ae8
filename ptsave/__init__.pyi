from ptsave import deltas as deltas
from ptsave import distributed as distributed
from ptsave._built import VERSION as __version__
from ptsave.appending.archive_writer import ArchiveWriter as ArchiveWriter
from ptsave.background.async_save import async_save as async_save
from ptsave.background.async_save import release_staging_memory as release_staging_memory
from ptsave.background.save_future import SaveFuture as SaveFuture
from ptsave.capturing.capture import Capture as Capture
from ptsave.capturing.capture import capture as capture
from ptsave.capturing.comparison import CaptureComparison as CaptureComparison
from ptsave.capturing.comparison import CapturedDifference as CapturedDifference
from ptsave.capturing.comparison import compare_captures as compare_captures
from ptsave.capturing.schema import CapturedCall as CapturedCall
from ptsave.capturing.schema import CapturedValue as CapturedValue
from ptsave.capturing.schema import CaptureSummary as CaptureSummary
from ptsave.comparison.compare import Comparison as Comparison
from ptsave.comparison.compare import compare as compare
from ptsave.contents.archive import Archive as Archive
from ptsave.contents.archive import TensorInfo as TensorInfo
from ptsave.contents.archive import open as open
from ptsave.contents.loading import load as load
from ptsave.contents.mapping import share as share
from ptsave.contents.mapping import verified as verified
from ptsave.conversion.compacting import Compaction as Compaction
from ptsave.conversion.compacting import compact as compact
from ptsave.conversion.converting import Conversion as Conversion
from ptsave.conversion.converting import convert as convert
from ptsave.errors import CheckpointWarning as CheckpointWarning
from ptsave.errors import CorruptCheckpointError as CorruptCheckpointError
from ptsave.errors import EntryNotFoundError as EntryNotFoundError
from ptsave.errors import NotCheckpointError as NotCheckpointError
from ptsave.errors import SaveError as SaveError
from ptsave.errors import StagingFullError as StagingFullError
from ptsave.errors import UnsupportedSourceError as UnsupportedSourceError
from ptsave.errors import UnsupportedUrlError as UnsupportedUrlError
from ptsave.errors import WrongBaseError as WrongBaseError
from ptsave.installation import install as install
from ptsave.installation import installed as installed
from ptsave.installation import uninstall as uninstall
from ptsave.models.iterating import iter_weights as iter_weights
from ptsave.models.load_model import load_model as load_model
from ptsave.models.save_model import save_model as save_model
from ptsave.models.weight_parts import WeightSlice as WeightSlice
from ptsave.models.weight_parts import default_weight_loader as default_weight_loader
from ptsave.models.weight_plan import LoadedWeights as LoadedWeights
from ptsave.preloading import preload as preload
from ptsave.serialization import save as save
from ptsave.state.lazy_buffers import register_lazy_buffer as register_lazy_buffer
from ptsave.state.modules import IncompatibleKeys as IncompatibleKeys
from ptsave.state.modules import load_state_dict as load_state_dict
from ptsave.state.modules import unsaved_tensors as unsaved_tensors
from ptsave.state.optimizer_matching import UnmatchedParameters as UnmatchedParameters
from ptsave.state.optimizers import load_optimizer_state_dict as load_optimizer_state_dict
from ptsave.state.renaming import add_prefix as add_prefix
from ptsave.state.renaming import strip_prefix as strip_prefix
from ptsave.training.checkpoint import RestoredEntries as RestoredEntries
from ptsave.training.checkpoint import load_checkpoint as load_checkpoint
from ptsave.training.checkpoint import load_into as load_into
from ptsave.training.checkpoint import save_checkpoint as save_checkpoint
from ptsave.training.checkpointer import AsyncCheckpointer as AsyncCheckpointer
from ptsave.writing.sharing import SavedBytes as SavedBytes

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
    "SavedBytes",
    "StagingFullError",
    "TensorInfo",
    "UnmatchedParameters",
    "UnsupportedSourceError",
    "UnsupportedUrlError",
    "WeightSlice",
    "WrongBaseError",
    "__version__",
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
    "preload",
    "register_lazy_buffer",
    "release_staging_memory",
    "save",
    "save_checkpoint",
    "save_model",
    "share",
    "strip_prefix",
    "uninstall",
    "unsaved_tensors",
    "verified",
]
