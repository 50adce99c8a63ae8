"""One format into another, or into a smaller file."""

from ptsave.conversion.compacting import Compaction, compact
from ptsave.conversion.converting import Conversion, convert

__all__ = ["Compaction", "Conversion", "compact", "convert"]
