"""How often tests kill, and the seed of the moments at which they do."""

import os
import random

ROUNDS = int(os.environ.get("PTSAVE_KILL_ROUNDS", "50"))
SEED = int(os.environ.get("PTSAVE_KILL_SEED", str(random.SystemRandom().randrange(1 << 32))))
