"""torch.save and torch.load at the speed of the hardware: the same files, byte for byte.

Importing this package imports nothing else, so that what needs no torch does not wait for it: the
command line shows help and lists files in a tenth of the time.  The first use of a public name
imports all of `ptsave.public`, and torch with it.  If torch is there already, that is done at once.
"""

import sys as _sys
import typing as _typing
from importlib import import_module as _import_module

from ptsave.support.version import VERSION as __version__  # refuses a copy that is not built

if _typing.TYPE_CHECKING:
    from ptsave import distributed as distributed
    from ptsave.public import *

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
    "register_lazy_buffer",
    "release_staging_memory",
    "save",
    "save_checkpoint",
    "save_model",
    "strip_prefix",
    "uninstall",
    "unsaved_tensors",
]


if not _typing.TYPE_CHECKING:  # or every name would be one for type checkers

    def __getattr__(name: str) -> _typing.Any:
        if name == "_C":  # linked with the libraries of torch, which has to be the right one
            _import_module("ptsave.support.torch_version")
            return _import_module("ptsave._C")
        if name.startswith("_"):
            raise AttributeError(f"module 'ptsave' has no attribute {name!r}", name=name)
        if name in __all__:
            public = _import_module("ptsave.public")
            globals().update((each, getattr(public, each)) for each in public.__all__)
            return globals()[name]
        try:
            return _import_module(f"ptsave.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"ptsave.{name}":
                raise
            raise AttributeError(f"module 'ptsave' has no attribute {name!r}", name=name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not _typing.TYPE_CHECKING and "torch" in _sys.modules:
    __getattr__("load")  # nobody waits for it: all is there at once, or this torch is refused
