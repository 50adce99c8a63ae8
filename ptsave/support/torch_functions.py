"""torch's own functions, as they were when ptsave was imported: what ptsave hands on goes there."""

from torch.serialization import load, save

__all__ = ["load", "save"]
