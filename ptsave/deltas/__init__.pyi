from ptsave.deltas.applying import apply as apply
from ptsave.deltas.folding import Folding as Folding
from ptsave.deltas.folding import fold as fold
from ptsave.deltas.folding import remove as remove
from ptsave.deltas.publishing import Publisher as Publisher

__all__ = ["Folding", "Publisher", "apply", "fold", "remove"]
