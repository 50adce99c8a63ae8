"""Extra state of modules that is no tensor: in a safetensors file it is text of the metadata."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ptsave.errors import CorruptPickleError
from ptsave.serialization import load, save
from ptsave.support.torch_modules import EXTRA_STATE_KEY_SUFFIX

__all__ = ["extra_state_in", "is_extra_state", "metadata_of"]

_PREFIX = "ptsave.extra_state."


def is_extra_state(key: Any, value: Any) -> bool:
    """Whether an entry of a state dict is a module's extra state, and no tensor.

    Examples
    --------
    >>> is_extra_state("layer._extra_state", {"count": 3}), is_extra_state("layer.weight", None)
    (True, False)
    """
    is_named_so = isinstance(key, str) and f".{key}".endswith(f".{EXTRA_STATE_KEY_SUFFIX}")
    return is_named_so and not isinstance(value, Tensor)


def metadata_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return extra state as metadata of a safetensors file: files of `save`, in base 64.

    Examples
    --------
    >>> metadata = metadata_of({"layer._extra_state": {"count": 3}})
    >>> extra_state_in(metadata, "model.safetensors")
    {'layer._extra_state': {'count': 3}}
    """
    texts = {}
    for name, value in objects.items():
        stream = io.BytesIO()
        save(value, stream)
        texts[_PREFIX + name] = base64.b64encode(stream.getvalue()).decode()
    return texts


def extra_state_in(metadata: Mapping[str, str], path: str) -> dict[str, Any]:
    """Return the extra state in a file's metadata, loaded with ``weights_only=True``.

    Raises
    ------
    CorruptPickleError
        If it cannot be.
    """
    found = {}
    for name, text in metadata.items():
        if name.startswith(_PREFIX):
            try:
                stream = io.BytesIO(base64.b64decode(text, validate=True))
                found[name.removeprefix(_PREFIX)] = load(stream, weights_only=True)
            except Exception as error:  # torch's unpickler stumbles in every way
                raise CorruptPickleError(f"{path}: {name}: {error}", path=path) from error
    return found
