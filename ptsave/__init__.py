"""torch.save and torch.load at the speed of the hardware: the same files, byte for byte.

Importing this package does not import torch, so `ptsave --help` and `ptsave ls` need a tenth of the
time that they would need with torch.  The first use of a public name imports the name's module and
torch; `preload` imports all modules.  If torch is already imported, but ptsave has no engine (its
compiled part) for this torch, the import of ptsave raises ImportError.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import Any as _Any

try:
    from ptsave._built import VERSION as __version__
except ModuleNotFoundError as _error:
    raise ImportError(
        "ptsave is not built here: run `make build`, or `pip install --no-build-isolation .`"
    ) from _error

# The modules of the public names; for type checkers, __init__.pyi imports the same names.
_NAMES = {
    "appending.archive_writer": "ArchiveWriter",
    "background.async_save": "async_save release_staging_memory",
    "background.save_future": "SaveFuture",
    "capturing.capture": "Capture capture",
    "capturing.comparison": "CaptureComparison CapturedDifference compare_captures",
    "capturing.schema": "CaptureSummary CapturedCall CapturedValue",
    "comparison.compare": "Comparison compare",
    "contents.archive": "Archive TensorInfo open",
    "contents.loading": "load",
    "contents.mapping": "share verified",
    "conversion.compacting": "Compaction compact",
    "conversion.converting": "Conversion convert",
    "errors": "CheckpointWarning CorruptCheckpointError EntryNotFoundError NotCheckpointError "
    "SaveError StagingFullError UnsupportedSourceError UnsupportedUrlError WrongBaseError",
    "installation": "install installed uninstall",
    "models.iterating": "iter_weights",
    "models.load_model": "load_model",
    "models.save_model": "save_model",
    "models.weight_parts": "WeightSlice default_weight_loader",
    "models.weight_plan": "LoadedWeights",
    "preloading": "preload",
    "serialization": "save",
    "state.lazy_buffers": "register_lazy_buffer",
    "state.modules": "IncompatibleKeys load_state_dict unsaved_tensors",
    "state.optimizer_matching": "UnmatchedParameters",
    "state.optimizers": "load_optimizer_state_dict",
    "state.renaming": "add_prefix strip_prefix",
    "training.checkpoint": "RestoredEntries load_checkpoint load_into save_checkpoint",
    "training.checkpointer": "AsyncCheckpointer",
    "writing.sharing": "SavedBytes",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_MODULES)]  # noqa: PLE0604 - strings, too


def __getattr__(name: str) -> _Any:
    if name == "_C" or _MODULES.get(name, "errors") != "errors":
        _import_module("ptsave.engines.choice").require()
    if name in _MODULES:
        from ptsave.support.calls import pausing_garbage_collection

        with pausing_garbage_collection():  # the collector takes 45 ms for torch's objects
            value = getattr(_import_module(f"ptsave.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    if name.startswith("_") and name != "_C":
        raise AttributeError(f"module 'ptsave' has no attribute {name!r}", name=name)
    try:
        return _import_module(f"ptsave.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"ptsave.{name}":
            raise
        raise AttributeError(f"module 'ptsave' has no attribute {name!r}", name=name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if hasattr(_sys.modules.get("torch"), "__version__"):  # not while torch is being imported
    _import_module("ptsave.engines.choice").require()
