"""Errors of the system while files are read: each has its number, and names the file.

A library between Python and the C library fails the n-th call that reads a file, for every n.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from _system import run_python
from safetensors.torch import save_file

import ptsave

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int countdown = 0;
static char target[4096];

void fail_read(int n, char const* name) {
  snprintf(target, sizeof target, "%s", name);  // the caller's is gone after the call
  countdown = n;
}
int reads_left(void) { return countdown; }

static int fails(int fd) {
  if (__atomic_load_n(&countdown, __ATOMIC_SEQ_CST) <= 0) return 0;
  char link[64], name[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, name, sizeof name - 1);
  if (n < 0) return 0;
  name[n] = 0;
  if (strcmp(name, target) != 0) return 0;
  if (__atomic_sub_fetch(&countdown, 1, __ATOMIC_SEQ_CST) != 0) return 0;
  errno = EIO;
  return 1;
}

#define WRAP(name, parameters, arguments)                         \
  ssize_t name parameters {                                       \
    static ssize_t(*next) parameters;                             \
    if (!next) next = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name); \
    return fails(fd) ? -1 : next arguments;                       \
  }
WRAP(read, (int fd, void* p, size_t n), (fd, p, n))
WRAP(pread, (int fd, void* p, size_t n, off_t at), (fd, p, n, at))
WRAP(pread64, (int fd, void* p, size_t n, off_t at), (fd, p, n, at))
WRAP(preadv, (int fd, struct iovec const* p, int n, off_t at), (fd, p, n, at))
WRAP(preadv64, (int fd, struct iovec const* p, int n, off_t at), (fd, p, n, at))
"""

_CHILD = """
import ctypes, errno, json, sys, warnings
import torch, ptsave
from ptsave.comparison.compare import compare
from ptsave.conversion.converting import convert
from ptsave.contents.opening import OpenOptions, open_checkpoint
from ptsave.inspection.extraction import read_entries
from ptsave.inspection.reports import listing_of
from ptsave.inspection.verification import verify_file
from ptsave.inspection.pickle_globals import required_globals

warnings.simplefilter("ignore")
shim = ctypes.CDLL(None)
model = torch.nn.Linear(40, 40)
readers = {
    "load": lambda f: ptsave.load(f, weights_only=True),
    "load_into": lambda f: ptsave.load_into(f, model),
    "load_model": lambda f: ptsave.load_model(model, f),
    "open": lambda f: ptsave.open(f),
    "get_tensor": lambda f: ptsave.open(f).get_tensor("weight"),
    "ls": lambda f: listing_of(open_checkpoint(f, OpenOptions())),
    "verify": verify_file,
    "globals": required_globals,
    "extract": lambda f: read_entries(f, ["weight"]),
    "convert": lambda f: convert(f, sys.argv[-1], force=True),
    "compare": lambda f: compare(f, f),
}
name = sys.argv[1]
wrong, untouched = [], []
for what, read in readers.items():
    if name.endswith(".safetensors") and what in ("load", "load_into"):
        continue  # torch's own loader
    untouched.append(what)
    for n in range(1, 60):
        shim.fail_read(n, name.encode())
        try:
            read(name)
            error = None
        except OSError as caught:
            error = caught
        except Exception as caught:
            wrong.append(f"{what} {n}: {type(caught).__name__}: {caught}")
            continue
        finally:
            left = shim.reads_left()
            shim.fail_read(0, b"")
        if left > 0:
            break
        if n == 1 and error is not None:
            untouched.remove(what)
        if error is not None and (error.errno, error.filename) != (errno.EIO, name):
            wrong.append(f"{what} {n}: {error!r} of {error.filename}")
print(json.dumps([wrong, untouched]))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(_SHIM)
    library = folder / "shim.so"
    options = ["-shared", "-fPIC", "-O1", "-o", str(library)]
    subprocess.run([compiler, *options, str(folder / "shim.c"), "-ldl"], check=True)
    return library


@pytest.mark.parametrize("kind", ["archive", "legacy", "safetensors"])
def test_read_errors_name_the_file(shim: Path, tmp_path: Path, kind: str) -> None:
    state = {k: v.detach() for k, v in torch.nn.Linear(40, 40).state_dict().items()}
    path = tmp_path / ("model.safetensors" if kind == "safetensors" else "model.pt")
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "archive")
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    ended = run_python(_CHILD, path, tmp_path / "out.pt", env=environment)
    wrong, untouched = json.loads(ended.stdout)
    assert not wrong, "\n".join(wrong)
    assert not untouched, "their first read is to fail"


_LIMITED = """
import os, resource, sys, torch, ptsave

path, call = sys.argv[1:3]
target = {"weight": torch.zeros(16 << 20)}
load = ptsave.load if call == "load" else lambda path: ptsave.load_into(path, target)
ptsave.preload()

def load_with(extra):
    with open(path, "rb") as file:  # not in the page cache: buffers are needed
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + extra,) * 2)
    try:
        load(path)
    except MemoryError as error:
        print(error, flush=True)
    else:
        print("loaded", flush=True)

for extra in map(int, sys.argv[3:]):
    child = os.fork()
    if child == 0:
        load_with(extra)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("call", ["load", "load_into"])
def test_a_limit_of_memory(tmp_path: Path, call: str) -> None:
    """With room for the tensors and little else there are fewer threads and buffers, or none.

    What the threads take meanwhile is chance: an error names the file at least.
    """
    path = tmp_path / "file.pt"
    torch.save({"weight": torch.ones(16 << 20)}, path)
    nbytes = path.stat().st_size
    refusal = f"{path}: too little memory for the file's 64.0 MiB"

    thrice = [nbytes + (extra << 20) for extra in (8, 24, 60, 140) for _ in range(3)]
    found = run_python(_LIMITED, path, call, nbytes // 2, *thrice).stdout.splitlines()
    assert len(found) == 13
    assert all(line.startswith(("loaded", refusal)) for line in found)
    assert found[0] != "loaded"
    assert all("loaded" in found[i : i + 3] for i in (1, 4, 7, 10)), found


_DAMAGED = """
import sys, ptsave
try:
    ptsave.load(sys.argv[1])
except ptsave.CorruptCheckpointError as error:
    assert error.path == sys.argv[1]
    assert str(error).startswith(sys.argv[1])
    print(sys.getfilesystemencoding())
"""


def test_a_name_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "é.pt"
    torch.save({"weight": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-30])
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = run_python(_DAMAGED, path, env={**os.environ, **ascii_only})
    assert result.stdout == "ascii\n"


def test_memory_with_a_name_that_no_file_can_have() -> None:
    memory = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, memory)
    memory.seek(0)
    memory.name = "\ud800"
    assert torch.equal(ptsave.load(memory)["weight"], torch.ones(2))


_FALLBACK = """
import ctypes, json, os, sys, warnings
import torch, ptsave
warnings.simplefilter("ignore")
shim = ctypes.CDLL(None)
run = ptsave.AsyncCheckpointer(sys.argv[1])
for step in (1, 2):
    run.save(step, value={"x": torch.full((400,), float(step))}).result()
run.wait()
name = os.fsencode(run.latest())
found = []
for n in range(1, 60):
    target = {"x": torch.zeros(400)}
    shim.fail_read(n, name)
    try:
        run.restore(value=target, fallback=True)
        found.append(target["x"].unique().tolist())
    except OSError as error:
        found.append(error.errno)
    left = shim.reads_left()
    shim.fail_read(0, b"")
    if left > 0:
        break
print(json.dumps(found))
"""


def test_a_sector_that_cannot_be_read_makes_a_restore_fall_back(shim: Path, tmp_path: Path) -> None:
    """While the newest file is verified; when it is read again, the restore raises."""
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    ended = run_python(_FALLBACK, tmp_path / "run", env=environment)
    found = json.loads(ended.stdout)
    *failed, last = found
    assert last == [2]  # no read has failed
    n_verifying = failed.index(errno.EIO)
    assert failed[:n_verifying] == [[1]] * n_verifying
    assert n_verifying > 3
    assert {*failed[n_verifying:]} == {errno.EIO}
