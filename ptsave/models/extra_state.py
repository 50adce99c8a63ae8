"""Extra state of modules that is no tensor: a safetensors file has it as text in its metadata."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ptsave.errors import CorruptPickleError
from ptsave.support.torch_modules import EXTRA_STATE_KEY_SUFFIX

_PREFIX = "ptsave.extra_state."


def is_extra_state(key: Any, value: Any) -> bool:
    """Return whether an entry of a state dict is a module's extra state, and no tensor.

    >>> is_extra_state("layer._extra_state", {"count": 3}), is_extra_state("layer.weight", None)
    (True, False)
    """
    is_named_so = isinstance(key, str) and f".{key}".endswith(f".{EXTRA_STATE_KEY_SUFFIX}")
    return is_named_so and not isinstance(value, Tensor)


def metadata_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return extra state as metadata of a safetensors file: each value saved, in base 64.

    >>> metadata = metadata_of({"layer._extra_state": {"count": 3}})
    >>> dict(ExtraState(metadata, "model.safetensors"))
    {'layer._extra_state': {'count': 3}}
    """
    return {
        _PREFIX + name: base64.b64encode(_saved(value)).decode() for name, value in objects.items()
    }


def metadata_names(objects: Iterable[str]) -> set[str]:
    """Return the keys of extra state in metadata."""
    return {_PREFIX + name for name in objects}


def require_loadable(objects: Mapping[str, Any]) -> None:
    """Raise TypeError, before anything is written, for extra state that cannot be loaded again."""
    for name, value in objects.items():
        try:
            _loaded(_saved(value))
        except Exception as error:  # torch's unpickler may raise anything
            reason = str(error).strip().splitlines()[0]
            raise TypeError(
                f"entry {name!r} could not be loaded from a model's files, which are read without "
                f"running code: {reason}: let get_extra_state() return tensors and plain values"
            ) from error


def _saved(value: Any) -> bytes:
    from ptsave.serialization import save

    stream = io.BytesIO()
    save(value, stream)
    return stream.getvalue()


def _loaded(data: bytes) -> Any:
    from ptsave.archive.loading import LoadOptions
    from ptsave.contents.loading import load_source

    options = LoadOptions("cpu", weights_only=True, wants_state=True)
    return load_source(io.BytesIO(data), options)


class ExtraState(Mapping[str, Any]):
    """The extra state in a safetensors file's metadata; each value is loaded when it is asked for.

    A value that cannot be loaded with ``weights_only=True`` raises CorruptPickleError.
    """

    def __init__(self, metadata: Mapping[str, str], path: str) -> None:
        self._path = path
        self._texts = {
            name.removeprefix(_PREFIX): text
            for name, text in metadata.items()
            if name.startswith(_PREFIX)
        }

    def __getitem__(self, name: str) -> Any:
        text = self._texts[name]
        try:
            return _loaded(base64.b64decode(text, validate=True))
        except Exception as error:  # torch's unpickler may raise anything
            message = f"{self._path}: {name}: {error}"
            raise CorruptPickleError(message, path=self._path) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)
