"""Fuzz the restricted unpickler for a number of seconds: it must do what torch's own does.

Each pickle is a mutation of one that torch.save wrote, and runs on torch's machine and on the
engine's.  Some of those that were accepted join the corpus.  One that makes a difference, or a
crash, is left in the folder that is given, together with how to run it again::

    python tests/fuzz/unpickler_fuzzer.py SECONDS [FOLDER]
    python tests/fuzz/unpickler_fuzzer.py --again SUBJECT FILE

Under AddressSanitizer and UndefinedBehaviorSanitizer (`make fuzz-unpickler-asan`) the extension is
compiled with `PTSAVE_SANITIZE` and the sanitizers' runtime is preloaded, because Python itself is
not compiled with it.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import torch
from unpickler_mutation import SAFE_GLOBALS, Subject, corpus, disagreement, mutated

_MAX_NBYTES = 20_000  # a pickle that has grown
_MAX_POOL = 2_000


def _subjects() -> dict[str, Subject]:
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns if nobody has decided
    torch.serialization.add_safe_globals(SAFE_GLOBALS)
    return {name: Subject(archive) for name, archive in corpus().items()}


def fuzz(seconds: float, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    subjects = _subjects()
    pool = [(name, subject.pickle) for name, subject in subjects.items()]
    originals = [data for _, data in pool]
    source = random.Random(seed := time.time_ns())
    running = folder / "running.pkl"  # what is left if the process dies
    end, n, n_accepted = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        name, original = source.choice(pool)
        data = mutated(original, originals, source)
        running.write_bytes(name.encode() + b"\n" + data)
        plain = source.random() < 0.8
        difference = disagreement(subjects[name], data, storages_are_plain=plain)
        if difference is not None:
            found = folder / f"difference-{n}.pkl"
            found.write_bytes(data)
            print(f"{difference}\n  {sys.executable} {__file__} --again {name!r} {found}")
            return 1
        n += 1
        if subjects[name].by_engine(data, storages_are_plain=True).error is None:
            n_accepted += 1
            if len(data) < _MAX_NBYTES and source.random() < 0.1:
                slot = source.randrange(len(subjects), _MAX_POOL)
                pool[slot : slot + 1] = [(name, data)]
    running.unlink(missing_ok=True)
    print(f"unpickler: {n} pickles ({n_accepted} accepted, seed {seed}), found nothing")
    return 0


def run_again(name: str, path: Path) -> int:
    subject = _subjects()[name]
    data = path.read_bytes()
    for plain in (True, False):
        print(plain, subject.by_engine(data, storages_are_plain=plain), subject.by_torch(data))
        print(disagreement(subject, data, storages_are_plain=plain))
    return 0


def main() -> int:
    faulthandler.enable()
    if sys.argv[1] == "--again":
        return run_again(sys.argv[2], Path(sys.argv[3]))
    return fuzz(float(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "build/fuzz"))


if __name__ == "__main__":
    sys.exit(main())
