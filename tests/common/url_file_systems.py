"""File systems of fsspec for tests: one without anything special, which can fail anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

MEMORY = "memory"
PLAIN = "plain"
GUARDED = "guarded"
TOKEN = {"token": "let me in"}


class PlainFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system in memory whose files are visible, and incomplete, while they are written."""

    protocol = PLAIN
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[dict[str, BaseException]] = {}  # what each method raises
    lost_nbytes: ClassVar[int] = 0  # of a file, without a word

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace(f"{cls.protocol}://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" not in mode:
            return super()._open(path, mode, **options)
        self._fail("open")
        assert not path.startswith("//")
        stream = super()._open(path, mode, **options)
        write, lost = stream.write, [self.lost_nbytes]

        def failing_write(data: Any) -> int:
            self._fail("write")
            n, lost[0] = len(data), max(lost[0] - len(data), 0)
            write(data if not lost[0] else b"")
            return n

        stream.write = failing_write
        stream.close = lambda: self._fail("close")
        return stream

    def mv(self, *arguments: Any, **options: Any) -> None:
        self._fail("mv")
        super().mv(*arguments, **options)

    def pipe_file(self, *arguments: Any, **options: Any) -> None:
        self._fail("pipe_file")
        super().pipe_file(*arguments, **options)

    def ls(self, *arguments: Any, **options: Any) -> Any:
        self._fail("ls")
        return super().ls(*arguments, **options)

    def rm_file(self, path: str, **options: Any) -> None:
        if "/." not in path:  # a temporary file
            self._fail("rm_file")
        super().rm_file(path, **options)

    def _fail(self, method: str) -> None:
        if method in self.failures:
            raise self.failures[method]


class GuardedFileSystem(PlainFileSystem):
    """One that opens with `TOKEN` only, so that storage options which get lost are noticed."""

    protocol = GUARDED
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self, token: str = "", **options: Any) -> None:
        if token != TOKEN["token"]:
            raise PermissionError("no token")
        super().__init__(**options)


@contextmanager
def failing(method: str, error: BaseException) -> Iterator[None]:
    """Let a method of the plain file system raise in the block."""
    PlainFileSystem.failures[method] = error
    try:
        yield
    finally:
        del PlainFileSystem.failures[method]


def register() -> None:
    fsspec.register_implementation(PLAIN, PlainFileSystem, clobber=True)
    fsspec.register_implementation(GUARDED, GuardedFileSystem, clobber=True)


def clear() -> None:
    """Remove all files in memory."""
    for fs in (fsspec.filesystem(MEMORY), fsspec.filesystem(PLAIN), guarded()):
        fs.store.clear()
        fs.pseudo_dirs[:] = [""]


def guarded() -> Any:
    """Return the guarded file system."""
    return fsspec.filesystem(GUARDED, **TOKEN)


def contents(protocol: str) -> dict[str, bytes]:
    """Return all files of one of them."""
    fs = fsspec.filesystem(protocol)
    return {path: file.getvalue() for path, file in fs.store.items()}


def nbytes_of(fetched: list[int]) -> int:
    """Return how many bytes were fetched since this was last asked."""
    total = sum(fetched)
    fetched.clear()
    return total
