"""Converts checkpoints to other formats, and makes them smaller."""

from ptsave.conversion.compacting import Compaction, compact
from ptsave.conversion.converting import Conversion, convert

__all__ = ["Compaction", "Conversion", "compact", "convert"]
