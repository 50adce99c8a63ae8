from ptsave.deltas.applying import apply as apply
from ptsave.deltas.folding import Folding as Folding
from ptsave.deltas.folding import fold as fold
from ptsave.deltas.folding import remove as remove
from ptsave.deltas.publishing import Publisher as Publisher
from ptsave.deltas.weights import Weights as Weights

__all__ = ["Folding", "Publisher", "Weights", "apply", "fold", "remove"]
