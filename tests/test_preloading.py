"""Public names are imported when they are used; preload() imports all that can be wanted later."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

from _system import run_python

import ptsave

# A program that can read no module any more once it has imported ptsave's.
_LOCKED = """
import io, os, sys, torch, ptsave
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ptsave.preload()
class Locked:
    def find_spec(self, name, path=None, target=None):
        raise ImportError(f"{name} is imported late")
sys.meta_path.insert(0, Locked())
os.chdir(sys.argv[1])
"""
_OPERATIONS = [
    "ptsave.save(model.state_dict(), 'a.pt', fsync=True)",
    "ptsave.load('a.pt')",
    "ptsave.save({'model': model}, 'module.pt')",
    "ptsave.load('module.pt', weights_only=False)",
    "ptsave.async_save(model.state_dict(), 'b.pt').result()",
    "ptsave.save_checkpoint('c.pt', model=model, optimizer=optimizer)",
    "ptsave.load_checkpoint('c.pt', model=model, optimizer=optimizer)",
    "ptsave.load_into('a.pt', model)",
    "ptsave.open('a.pt').verify()",
    "ptsave.save_model(model, 'published')",
    "ptsave.load_model(model, 'published')",
    "ptsave.convert('published', 'd.pt')",
    "ptsave.convert('d.pt', 'e.safetensors')",
    "ptsave.convert('d.pt', 'dcp', format='dcp')",
    "ptsave.open('dcp')['weight']",
    "ptsave.compact('d.pt', 'f.pt')",
    "ptsave.compare('d.pt', 'e.safetensors')",
    "with ptsave.capture(model, 'run.pt') as run: model(torch.ones(3)); run.step()",
    "ptsave.open('run.pt').summary()",
    "ptsave.compare_captures('run.pt', 'run.pt')",
    "with ptsave.ArchiveWriter('g.pt') as writer: writer.add('a', torch.ones(3))",
    "with ptsave.AsyncCheckpointer('h') as run: run.save(1, model=model)",
    "ptsave.deltas.Publisher('versions', 'published', checksum='blake3').publish(model)",
    "ptsave.deltas.apply('versions', 'published')",
    "with ptsave.installed(safetensors=True): torch.save([1], io.BytesIO())",
]


def test_nothing_is_imported_late(tmp_path: Path) -> None:
    """As if the program had given up its rights."""
    lines = [_LOCKED]
    for operation in _OPERATIONS:
        lines += ["try:", f"    {operation}", "except Exception as error:"]
        lines += [f"    print({operation!r}, error)"]
    done = run_python("\n".join(lines), tmp_path, options=["-W", "ignore"], status=None)
    assert (done.stdout, done.stderr) == ("", "")


def test_each_name_has_its_module() -> None:
    """What type checkers see is what there is."""
    stub = Path(ptsave.__file__).with_suffix(".pyi").read_text()
    imported = {
        alias.asname: (node.module, alias.name)
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for package in ("deltas", "distributed"):
        assert imported.pop(package) == ("ptsave", package)
    assert sorted(name for name in imported if name) == sorted(ptsave.__all__)
    for name, (module, original) in imported.items():
        assert getattr(ptsave, str(name)) is getattr(sys.modules[str(module)], original)


_SEEN = """
import sys
print('torch' in sys.modules, 'ptsave._C' in sys.modules, end=' ')
print('ptsave.engines.choice' in sys.modules)
"""


def test_an_import_imports_little() -> None:
    found = run_python(f"import torch, ptsave{_SEEN}ptsave.strip_prefix{_SEEN}").stdout
    assert found.splitlines() == ["True False True"] * 2
    found = run_python(f"import ptsave; ptsave.CorruptCheckpointError{_SEEN}").stdout
    assert found.splitlines() == ["False False False"]


# The first call of a process, after torch's and ptsave's import.
_FIRST = """
import gc, os, sys, torch, ptsave
model = torch.nn.Linear(3, 2)
torch.save(model.state_dict(), 'a.pt')
for call in sys.argv[1:]:
    if os.fork() == 0:
        before, passes = set(sys.modules), []
        gc.callbacks.append(lambda phase, info: passes.append(info['generation']))
        exec(call)
        gc.callbacks.clear()
        print(*(name for name in sys.modules if name not in before), '|', *passes, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, call
"""
_SAVING = "errors sources support writing"
_LOADING = "archive contents errors sources support"
_FIRST_CALLS = {
    "ptsave.save(model.state_dict(), 'b.pt')": f"{_SAVING} serialization",
    "ptsave.load('a.pt')": _LOADING,
    "ptsave.open('a.pt')['weight']": f"{_LOADING} tree",
    "ptsave.load_into('a.pt', model)": f"{_LOADING} state training tree",
    "ptsave.load_model(model, 'a.pt')": f"{_LOADING} models state tree",
    "ptsave.async_save(model.state_dict(), 'b.pt').result()": f"{_SAVING} background",
    "ptsave.AsyncCheckpointer('c').save(1, model=model).result()": f"{_SAVING} background training",
}
# Modules for ranks, damage, optimizers, other formats and places.
_RARE = (
    *("archive.damage", "archive.group", "archive.recovery", "archive.remote"),
    *("contents.captures", "contents.dcp", "sources.url_"),
    *("contents.safetensors", "models.group", "state.optimizer", "support.group"),
    *("support.rank_", "training.group"),
)


def test_a_first_call_imports_what_it_needs(tmp_path: Path) -> None:
    """And sets no pass of the garbage collector off over all objects of torch."""
    done = run_python(_FIRST, *_FIRST_CALLS, cwd=tmp_path)
    for call, line in zip(_FIRST_CALLS, done.stdout.splitlines(), strict=True):
        modules, passes = (part.split() for part in line.split("|"))
        own = [name.removeprefix("ptsave.") for name in modules if name.startswith("ptsave.")]
        assert {name.partition(".")[0] for name in own} - {"_C", "_core"} == {
            *_FIRST_CALLS[call].split()
        }
        assert [name for name in own if name.startswith(_RARE)] == []
        libraries = ("fsspec", "numpy", "safetensors", "torch.distributed.checkpoint", "decimal")
        assert [name for name in modules if name.startswith(libraries)] == []
        assert "2" not in passes, call


def test_ptsave_may_be_imported_while_torch_is(tmp_path: Path) -> None:
    """As by a hook of a .pth file: torch does not know its version yet."""
    (tmp_path / "torch.py").write_text("import ptsave\n__version__ = 'none'\n")
    home = Path(ptsave.__file__).parent.parent
    path = os.pathsep.join([str(tmp_path), str(home)])
    run_python("import torch", env={**os.environ, "PYTHONPATH": path})
