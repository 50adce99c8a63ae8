from ptsave.deltas.applying import apply as apply
from ptsave.deltas.publishing import Publisher as Publisher

__all__ = ["Publisher", "apply"]
