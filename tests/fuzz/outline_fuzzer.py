"""Fuzz outlines for a number of seconds: each is refused, or lists what torch's objects give.

A file is an archive with a mutation of a pickle that torch.save wrote, an archive or a safetensors
file with some bytes changed.  One that makes a difference, or a crash, is left in the folder that
is given; under the name of a checkpoint `ptsave ls` and `verify` take it again::

    python tests/fuzz/outline_fuzzer.py SECONDS [FOLDER]
"""

from __future__ import annotations

import faulthandler
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import torch
from outlines import assert_equal_or_left_to_torch
from safetensors.torch import save as safetensors_bytes
from stock_comparison import zip_records, zipped
from unpickler_mutation import corpus, mutated

from ptsave.inspection.reports import whole_file
from ptsave.inspection.verification import verify_file

_MAX_CHANGES = 4


def _changed(data: bytes, source: random.Random) -> bytes:
    """Return bytes of which a few differ, are missing or are twice there."""
    changed = bytearray(data)
    for _ in range(source.randint(1, _MAX_CHANGES)):
        at = source.randrange(len(changed)) if source.random() < 0.5 else -source.randint(1, 200)
        at %= len(changed)
        kind = source.random()
        if kind < 0.6:
            changed[at] = source.choice((0, 1, 0x7F, 0xFF, changed[at] ^ 1 << source.randrange(8)))
        elif kind < 0.8 and len(changed) > 100:
            del changed[at : at + source.randint(1, 16)]
        else:
            changed[at:at] = changed[at : at + source.randint(1, 16)]
    return bytes(changed)


def _files() -> tuple[list[dict[str, bytes]], list[bytes]]:
    archives = [*corpus().values()]
    tensors = {"a": torch.ones(2, 3), "b.c": torch.zeros(0, 2), "d": torch.tensor(1.5)}
    safetensors = safetensors_bytes(tensors, {"format": "pt"})
    return [zip_records(data) for data in archives], [*archives, *[safetensors] * len(archives)]


def fuzz(seconds: float, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(seed := time.time_ns())
    archives, files = _files()
    pickles = [records["data.pkl"] for records in archives]
    end, n, n_outlines = time.monotonic() + seconds, 0, 0
    path = folder / "outlined.pt"  # what is left if the process dies
    while time.monotonic() < end:
        if source.random() < 0.7:
            records = source.choice(archives)
            data = zipped(records | {"data.pkl": mutated(records["data.pkl"], pickles, source)})
        else:
            data = _changed(source.choice(files), source)
        try:
            n_outlines += assert_equal_or_left_to_torch(data, folder)
            found = whole_file(str(path), None)
            assert found is None or found == verify_file(str(path))
        except Exception as error:
            kept = path.rename(folder / f"outline-{n}.pt")
            print(f"{type(error).__name__}: {error}\n  {kept} (seed {seed})")
            return 1
        n += 1
    path.unlink(missing_ok=True)
    print(f"outlines: {n} files ({n_outlines} with an outline, seed {seed}), found nothing")
    return 0


def main() -> int:
    faulthandler.enable()
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns if nobody has decided
    return fuzz(float(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "build/fuzz"))


if __name__ == "__main__":
    sys.exit(main())
