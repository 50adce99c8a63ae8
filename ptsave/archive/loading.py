"""Loads one file or file object; ptsave loads archives, and torch's loader loads other files."""

from __future__ import annotations

import mmap as mmap_module
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.serialization import UNSAFE_MESSAGE, get_default_mmap_options
from torch.utils.serialization import config as torch_config

from ptsave.archive.reader import RecordReader
from ptsave.archive.unpickling import fills_storages, unpickle, unpickle_without_bytes
from ptsave.errors import (
    CorruptCheckpointError,
    MalformedPickleError,
    UnsupportedSourceError,
    not_checkpoint,
)
from ptsave.sources.kinds import (
    HEAD_NBYTES,
    is_known,
    is_legacy,
    is_of_another_program,
    is_safetensors,
    is_zip,
    regular_only,
    what_it_surely_is,
)
from ptsave.sources.locations import describe
from ptsave.support import torch_names as stock
from ptsave.support.calls import progress_bar, warn_user
from ptsave.support.torch_names import (
    IGNORES_CASE_OF_VARIABLES,
    WARNS_OF_UNUSED_ARGUMENTS,
    ArchiveFileReader,
    check_dill_version,
    defaults_to_weights_only,
    log_api_usage,
    restricted_unpickler,
)

_TORCHSCRIPT_WARNING = (
    "'torch.load' received a zip file that looks like a TorchScript archive dispatching to "
    "'torch.jit.load' (call 'torch.jit.load' directly to silence this warning)"
)


class LoadOptions(NamedTuple):
    """Arguments of :func:`ptsave.load` that say how to load a file.

    `wants_state` is for restoring a checkpoint: TorchScript archives are refused, and harmless
    values that torch's restricted unpickler refuses, such as NumPy's scalars, are accepted.
    `leaves_opaque` is for inspecting a file: see `RecordReader`.  `on_map` gets the reader and the
    mapped file before the object is rebuilt; with it, a file that cannot be mapped is refused.
    """

    map_location: Any = None
    pickle_module: Any = None
    weights_only: bool | None = None
    mmap: bool | None = None
    verify: bool = True
    progress: bool = False
    pickle_load_args: Mapping[str, Any] = {}
    wants_state: bool = False
    leaves_opaque: bool = False
    on_map: Callable[[Any, torch.UntypedStorage], Any] | None = None  # see `maps.watch`

    @property
    def maps(self) -> bool:
        """Whether to map the file into memory: `mmap`, or torch's default if `mmap` is None."""
        return torch_config.load.mmap if self.mmap is None else self.mmap


def load_file(f: Any, options: LoadOptions, reader: RecordReader | None) -> Any:
    """Load `f` as :func:`torch.load` does, and close `reader`, the result of `reader_for`."""
    begin = None if _is_path(f) else _position(f)
    restricted = resolve_weights_only(options.weights_only, options.pickle_module)
    if options.on_map is not None:
        with ExitStack() as stack:
            if reader is not None:
                stack.callback(reader.close)
            _require_mappable(f, reader)
            stack.pop_all()
    if reader is not None and reader.engine.find("constants.pkl") is not None:
        reader.close()
        if options.wants_state:
            from ptsave.archive.damage import torchscript_error

            raise torchscript_error(reader.path)
        warn_user(_TORCHSCRIPT_WARNING)
        return _load_torchscript(f, options.map_location, restricted)
    module = restricted_unpickler if restricted else options.pickle_module or pickle
    if reader is not None and not reader.engine.all_stored:
        from ptsave.archive.damage import check_compressed_members

        with closing(reader):
            check_compressed_members(reader)
        reader = None
        if not fills_storages(options.map_location):  # torch would swap bytes that are not there
            archive = ArchiveFileReader(os.fspath(f) if _is_path(f) else f)
            try:
                return unpickle_without_bytes(
                    archive, options.map_location, module, options.pickle_load_args
                )
            except pickle.UnpicklingError as error:
                raise_with_advice(error, module)
    if reader is None:
        return _load_by_torch(f, options, restricted)
    reader.allows_values = options.wants_state
    reader.leaves_opaque = options.leaves_opaque
    log_api_usage("torch.load")
    if options.pickle_load_args and restricted and WARNS_OF_UNUSED_ARGUMENTS:
        warn_user("pickle_load_args only works if `weights_only=False`.")
    with (
        closing(reader),
        progress_bar(options.progress, "loading", reader.engine.nbytes) as reader.progress,
    ):
        overall = _map_file(reader, options.map_location) if options.maps else None
        if options.on_map is not None and overall is not None:
            options.on_map(reader, overall)
        result = rebuild(reader, options, module, partial(unpickle, overall_storage=overall))
        if options.leaves_opaque:
            from ptsave.tree.tree import drop_opaque_attributes

            drop_opaque_attributes(result)
        end = None if begin is None else begin + reader.end_of_storages()
    if end is not None:
        f.seek(end)
    return result


def _require_mappable(f: Any, reader: RecordReader | None) -> None:
    """Raise an error for a file that cannot be mapped and compared with its checksums."""
    name = describe(f)
    if reader is None and _is_path(f):
        os.stat(f)  # raises FileNotFoundError
    if (
        reader is None
        or not reader.engine.all_stored
        or reader.engine.find("constants.pkl") is not None
    ):
        raise no_map(name)
    if get_default_mmap_options() == mmap_module.MAP_SHARED:
        raise ValueError(f"{name}: a map that is verified needs MAP_PRIVATE, torch's default")


def no_map(name: str) -> UnsupportedSourceError:
    """Return the error for a file that cannot be mapped and compared with its checksums."""
    return UnsupportedSourceError(
        f"{name}: only a safetensors file, or an uncompressed .pt archive of torch 1.6 or later, "
        "can be mapped and verified: load the file without mmap"
    )


def _load_by_torch(f: Any, options: LoadOptions, restricted: bool) -> Any:
    from ptsave.sources.locations import named_errors

    runs_no_code = restricted and not callable(options.map_location)
    with (
        _naming_what_it_is(f, runs_no_code=runs_no_code),
        _under_another_name(f) as opened,
        named_errors(describe(f)),
    ):
        return stock.load(
            opened,
            options.map_location,
            options.pickle_module,
            weights_only=restricted,
            mmap=options.maps,
            **options.pickle_load_args,
        )


@contextmanager
def _under_another_name(f: Any) -> Iterator[Any]:
    """Yield `f`; for a torch file named ``*.safetensors``, yield a name without this suffix."""
    if _is_path(f) and str(f).endswith(".safetensors"):
        head, _ = _head_of(f, None)
        if is_zip(head) or is_legacy(head):
            with open(f, "rb", opener=regular_only) as stream:
                name = f"/proc/self/fd/{stream.fileno()}"
                try:
                    yield name
                except RuntimeError as error:
                    error.args = tuple(str(each).replace(name, str(f)) for each in error.args)
                    raise
            return
    yield f


def rebuild(
    reader: RecordReader, options: LoadOptions, pickle_module: Any, unpickle: Callable[..., Any]
) -> Any:
    """Rebuild an archive's object with `unpickle`; with ``verify``, check all but the storages."""
    check_dill_version(options.pickle_module)
    arguments = {"encoding": "utf-8", **options.pickle_load_args}
    reader.check_version()
    try:
        with reader.naming_what_needs_memory():
            result = unpickle(
                reader,
                map_location=options.map_location,
                pickle_module=pickle_module,
                pickle_load_args=arguments,
            )
    except pickle.UnpicklingError as error:
        raise_with_advice(error, pickle_module)
    if reader.verify:
        reader.check_small_records()
    return result


@contextmanager
def _naming_what_it_is(f: Any, *, runs_no_code: bool) -> Iterator[None]:
    """If torch fails to load a file, raise an error that names the damage or the file's format.

    Unless the file is in another program's format, this error repeats torch's message, because
    programs may look for the message.  `runs_no_code` says that neither the user's code nor code
    that the file names can have raised torch's error.
    """
    begin = None if _is_path(f) else _position(f)
    try:
        yield
    except (OSError, MemoryError, CorruptCheckpointError):
        raise
    except Exception as error:
        head, nbytes = _head_of(f, begin)
        what = what_it_surely_is(head, nbytes)
        path = describe(f)
        if what is None:
            if not _tells_of_damage(error, head, nbytes, runs_no_code):
                raise
            raise MalformedPickleError.of_file(error, path) from error
        words = "" if is_of_another_program(head) else f"\n{error}"
        raise not_checkpoint(f"{path} is not a checkpoint: {what}{words}", path, error) from error


def _tells_of_damage(error: Exception, head: bytes, nbytes: int, runs_no_code: bool) -> bool:
    """Whether damage in a file can have caused an error of torch's loader."""
    is_other = is_safetensors(head, nbytes) or (is_known(head) and not is_legacy(head))
    if is_other or not MalformedPickleError.stands_for(error):
        return False
    return "corrupt" in str(error) if type(error) is RuntimeError else runs_no_code


def _is_path(f: Any) -> bool:
    return isinstance(f, (str, os.PathLike))


def _position(f: Any) -> Any:
    try:
        return f.tell()
    except Exception:  # a file-like object may raise any error
        return None


def _head_of(f: Any, begin: Any) -> tuple[bytes, int]:
    """Return a file's first bytes and size; if it is unreadable, those of a two-byte pickle."""
    try:
        if _is_path(f):
            with open(f, "rb") as stream:
                return stream.read(HEAD_NBYTES), os.fstat(stream.fileno()).st_size
        nbytes = f.seek(0, os.SEEK_END) - begin
        f.seek(begin)
        head = bytes(f.read(HEAD_NBYTES))
    except Exception:  # the caller raises the load's own error
        return b"\x80\x02", 2
    return head, nbytes


def _load_torchscript(f: Any, map_location: Any, restricted: bool) -> Any:
    if restricted:
        raise RuntimeError(
            "Cannot use ``weights_only=True`` with TorchScript archives passed to "
            "``torch.load``. " + UNSAFE_MESSAGE
        )
    return torch.jit.load(f, map_location=map_location)


def _map_file(reader: RecordReader, map_location: Any) -> Any:
    """Map the reader's open file into memory, even if its path names another file by now."""
    shared = get_default_mmap_options() == mmap_module.MAP_SHARED
    if shared and fills_storages(map_location) and not reader.is_native_byte_order():
        raise ValueError(
            f"{reader.path} is in another byte order than this machine, and loading it with "
            "mmap=True and MAP_SHARED would swap the bytes in the file itself: use MAP_PRIVATE, or "
            "mmap=False"
        )
    descriptor = reader.engine.descriptor
    nbytes = os.fstat(descriptor).st_size
    return torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", shared, nbytes)


_TRUE_VALUES = ("1", "y", "yes", "true")


def raise_with_advice(error: pickle.UnpicklingError, pickle_module: Any) -> NoReturn:
    """Raise an unpickling error, with torch's advice if torch's restricted unpickler raised it."""
    if pickle_module is not restricted_unpickler or isinstance(error, RuntimeError):
        raise error
    raise pickle.UnpicklingError(_weights_only_message(str(error))) from None


def resolve_weights_only(weights_only: bool | None, pickle_module: Any) -> bool:
    """Return `weights_only` after torch's default and environment variables are applied."""
    force = _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    force_not = _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    if force and force_not:
        raise RuntimeError(
            "Only one of `TORCH_FORCE_WEIGHTS_ONLY_LOAD` or `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD` "
            "should be set, but both were set."
        )
    restricted = defaults_to_weights_only(pickle_module) if weights_only is None else weights_only
    if force:
        restricted = True
    elif force_not and weights_only is None:
        warn_user(
            "Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected, since the"
            "`weights_only` argument was not explicitly passed to `torch.load`, forcing "
            "weights_only=False."
        )
        restricted = False
    if restricted and pickle_module is not None:
        raise RuntimeError("Can not safely load weights when explicit pickle_module is specified")
    return bool(restricted)


def _is_set(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    return (value.lower() if IGNORES_CASE_OF_VARIABLES else value) in _TRUE_VALUES


def _weights_only_message(message: str) -> str:
    """Return the message of torch's restricted unpickler with torch's advice around it."""
    documentation = (
        "\n\nCheck the documentation of torch.load to learn more about types accepted by default "
        "with weights_only https://pytorch.org/docs/stable/generated/torch.load.html."
    )
    if re.search(r"GLOBAL (\S+) was not an allowed global by default.", message):
        return (
            "Weights only load failed. This file can still be loaded, to do so you have two "
            "options, \033[1mdo those steps only if you trust the source of the checkpoint\033[0m. "
            f"\n\t(1) {UNSAFE_MESSAGE}\n\t(2) Alternatively, to load with `weights_only=True` "
            "please check the recommended steps in the following error message.\n\t"
            f"WeightsUnpickler error: {message}{documentation}"
        )
    if re.search(r"(\S+) must be (\S+) to load", message):
        return f"Weights only load failed. {message}\n {UNSAFE_MESSAGE}\n"
    advice = (
        ""
        if re.search(r"whose module (\S+) is blocked", message)
        else "Please file an issue with the following so that we can make `weights_only=True` "
        "compatible with your use case: WeightsUnpickler error: "
    )
    return f"Weights only load failed. {UNSAFE_MESSAGE}\n{advice}\n\n{message}{documentation}"
