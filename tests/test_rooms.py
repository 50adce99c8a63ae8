"""The rooms of ptsave: one direction of imports, no circles, and no private names at the top."""

from __future__ import annotations

import ast
import functools
import pickle
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import ptsave

ROOT = Path(ptsave.__file__).parent
# Each may import from those before it, and none from those behind it (ARCHITECTURE.md).
ROOMS = (
    "_built",
    "engines",
    "_C",
    "_core",
    "errors",
    "support",
    "tree",
    "sources",
    "archive",
    "dcp",
    "writing",
    "state",
    "contents",
    "serialization",
    "streaming",
    "background",
    "appending",
    "training",
    "models",
    "deltas",
    "distributed",
    "inspection",
    "comparison",
    "capturing",
    "conversion",
    "installation",
    "integrations",
    "lazy_buffers",
    "__init__",
    "preloading",
    "startup",
    "build_engine",
    "bench",
    "cli",
    "__main__",
)

# Rooms that stand alone, each with the rooms and modules that import it.
ALONE: dict[str, set[str]] = {
    "capturing": {"cli", "contents.captures"},
    "integrations": set(),
    "bench": {"cli"},
}
# The module that imports a later room, once, in a function; its imports for types do not count.
DECIDES = {"capturing": "contents.captures"}

# The rooms of csrc/, each with those that it may include.
CSRC = Path(__file__).parent.parent / "csrc"
CPP_ROOMS = {
    "core/base": "",
    "core/crc": "",
    "core/format": "base memory",
    "core/hash": "",
    "core/memory": "base",
    "core/patches": "hash",
    "core/pipeline": "base",
    "core/io": "base crc memory pipeline",
    "core/statistics": "crc memory pipeline",
    "core/read": "base crc format memory pipeline io",
    "core/write": "base crc format hash memory pipeline io",
    "pickle/common": "",
    "pickle/scan": "common",
    "pickle/in": "common",
    "pickle/out": "common",
    "pickle/outline": "common in",
}


@functools.cache
def modules() -> dict[str, Path]:
    """Return the modules of ptsave, by what an import calls them."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts)] = path
    return found


@functools.cache
def imports_of(name: str, path: Path) -> tuple[str, ...]:
    """Return the modules that a module imports, at its beginning or in a function.

    Imports from rooms that stand alone do not count if they are for type checkers only.
    """
    return tuple(_imports_of(name, path))


def _imports_of(name: str, path: Path) -> Iterator[str]:
    known = modules()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for_types = {
        part
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for part in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for each in wanted:
            first, _, rest = each.partition(".")
            if first != "ptsave" or (node in for_types and room_of(rest) in DECIDES):
                continue
            # A module, a name in one, or a name in a package or at the top.
            for candidate in (rest, rest.rpartition(".")[0]):
                if candidate in known or candidate in ("_built", "_core"):
                    yield candidate
                    break
                if f"{candidate}.__init__" in known:
                    yield f"{candidate}.__init__"
                    break
            else:
                assert "." not in rest, f"{name} imports {each}, which is not there"
                yield "__init__"


def room_of(module: str) -> str:
    return module.partition(".")[0]


def test_every_room_is_listed() -> None:
    found = {room_of(name) for name in modules()} | {"_built", "_core"}
    assert found == set(ROOMS)


def test_imports_have_one_direction() -> None:
    upwards = [
        f"{name} -> {imported}"
        for name, path in modules().items()
        for imported in imports_of(name, path)
        if ROOMS.index(room_of(imported)) > ROOMS.index(room_of(name))
        and DECIDES.get(room_of(imported)) != name
    ]
    assert not upwards


def imports_in_functions(path: Path) -> Iterator[str]:
    """Yield the modules from which functions of a module import."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    yield node.module or ""


def test_rooms_that_stand_alone() -> None:
    for room, allowed in ALONE.items():
        importing = {
            name if name in allowed else room_of(name)
            for name, path in modules().items()
            if room in map(room_of, imports_of(name, path))
        }
        assert importing == {room} | allowed
    for room, only in DECIDES.items():
        found = [each for each in imports_in_functions(modules()[only]) if room in each.split(".")]
        assert len(found) == 1


def test_no_circles() -> None:
    graph = {
        name: {
            imported
            for imported in imports_of(name, path)
            if imported != name and DECIDES.get(room_of(imported)) != name
        }
        for name, path in modules().items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def includes_of(path: Path) -> Iterator[str]:
    """Yield the folder of each header of csrc/ that a C++ file includes."""
    for header in re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE):
        yield header.rpartition("/")[0]


def test_cpp_rooms_include_only_those_below() -> None:
    for folder in ("core", "pickle"):
        sources = [path for path in (CSRC / folder).rglob("*") if path.suffix in (".h", ".cpp")]
        rooms = {path.parent.relative_to(CSRC).as_posix() for path in sources}
        assert rooms == {room for room in CPP_ROOMS if room.startswith(folder)}
        for path in sources:
            room = path.parent.relative_to(CSRC).as_posix()
            allowed = {room, *(f"{folder}/{name}" for name in CPP_ROOMS[room].split())}
            within = {each for each in includes_of(path) if each.startswith(f"{folder}/")}
            assert within <= allowed, path


def test_packages_import_nothing() -> None:
    """What a room holds is asked for by its module: importing one does not import the others.

    ``ptsave.conversion.convert`` was public before the module became a room.
    """
    for name, path in modules().items():
        if name.endswith(".__init__") and name != "conversion.__init__":
            assert not list(imports_of(name, path)), name


def test_no_private_names_at_the_top() -> None:
    """Beside what is public there are rooms and modules only."""
    others = {name for name in vars(ptsave) if not name.startswith("_")} - set(ptsave.__all__)
    assert others <= {room_of(name) for name in modules()}


def test_the_path_that_files_name() -> None:
    """A module that was saved whole names the hook of a lazy buffer by where it used to be."""
    from ptsave.state.lazy_buffers import LazyBufferHook

    assert b"cptsave.lazy_buffers\nLazyBufferHook\n" in pickle.dumps(LazyBufferHook("x"), 2)
    old = b"\x80\x02cptsave.lazy_buffers\nLazyBufferHook\n)\x81}X\x04\0\0\0nameX\x01\0\0\0xsb."
    assert pickle.loads(old).name == "x"


def private_names_in(path: Path, attributes: set[str]) -> Iterator[str]:
    """Yield each use of a private name of torch: what is imported, and attributes by their name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            words = [node.module or "", *(alias.name for alias in node.names)]
            if any(re.search(r"(^|\.)_[a-z]", word) for word in words):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            of_torch = re.match(r"torch(\.\w+)*\._[a-z]", text) is not None
            if of_torch or (node.attr in attributes and ast.unparse(node.value) != "self"):
                yield f"{node.lineno}: {text}"


def test_private_names_of_torch_have_one_home() -> None:
    """Whoever ports ptsave to another torch reads these, and csrc/pickle."""
    homes = ("support.torch_", "capturing.torch_")
    adapters = {name: path for name, path in modules().items() if name.startswith(homes)}
    constants = (
        str(node.value)
        for path in adapters.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    )
    attributes = {text for text in constants if re.fullmatch(r"_[a-z]\w*", text)}
    assert {"_buffers", "_cdata", "_load_state_dict_pre_hooks"} <= attributes
    assert any(True for path in adapters.values() for _ in private_names_in(path, attributes))
    strays = [
        f"{name}:{use}"
        for name, path in modules().items()
        if name not in adapters
        for use in private_names_in(path, attributes)
    ]
    assert not strays
