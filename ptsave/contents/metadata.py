"""Collects the metadata of an archive from its small records."""

from __future__ import annotations

from collections.abc import Mapping

_SMALL_TEXTS = ("version", "byteorder", "serialization_id", "format_version", "storage_alignment")


def metadata_of(small: Mapping[str, bytes]) -> dict[str, str]:
    """Return the texts of an archive's small records, such as its version."""
    found = {
        text: next((small[name] for name in places if name in small), None)
        for text, *places in ((text, f".data/{text}", f".{text}", text) for text in _SMALL_TEXTS)
    }
    texts = {text: data.decode("utf-8", "replace") for text, data in found.items() if data}
    return {"format": "pt", **{text: value.strip() for text, value in texts.items()}}
