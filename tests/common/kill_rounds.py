"""How often tests kill, and the seed of the moments at which they do.

A plain run is a short one with the same moments each time; `make kill` takes others, and many.
"""

import os
import random

_WANTED = os.environ.get("PTSAVE_KILL_ROUNDS")
ROUNDS = int(_WANTED or "14")
_DEFAULT_SEED = random.SystemRandom().randrange(1 << 32) if _WANTED else 1
SEED = int(os.environ.get("PTSAVE_KILL_SEED", str(_DEFAULT_SEED)))
