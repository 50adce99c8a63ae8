"""Makes code of `torch.compile` see hooks of modules that come and go.

Dynamo compiles a module's call without hooks if the module has none at that moment.  Neither calls
nor guards look for new hooks later (`skip_nnmodule_hook_guards`).  So code that was compiled
before, even for another instance of the class, would silently leave out hooks.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from ptsave.support.torch_names import private

_DYNAMO = "torch._dynamo"
_AFTER_CONFIG = f"{_DYNAMO}.convert_frame"  # is imported once the configuration exists
_OPTION = "skip_nnmodule_hook_guards"


class HookWatch:
    """Makes dynamo recompile code that ran without hooks, and guard code against new hooks.

    It drops compiled code of all modules, because nothing tells which modules a piece of code
    calls.  It does not import dynamo, which takes seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n = 0
        self._finder = _Finder(self)
        self._was_skipped: bool | None = None  # None while dynamo has its own configuration
        self._is_overridden = False

    def begin(self) -> None:
        """Begin to watch, after hooks were registered; `end` must follow."""
        with self._lock:
            self._n += 1
            if _DYNAMO in sys.modules:
                self.guard_hooks()
                self._forget_code()
            elif self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)

    def end(self) -> None:
        """Stop watching, after the hooks were removed; code is compiled again without them."""
        with self._lock:
            self._n -= 1
            if self._n:
                return
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            if self._was_skipped is not None:
                self._restore()
                self._forget_code()

    def guard_hooks(self) -> None:
        """Make dynamo guard all code that it compiles from now on against new hooks."""
        if self._was_skipped is not None or not self._n:
            return
        config = _config()
        entry = private(config, "_config")[_OPTION]
        # The default is for all threads; a value that was set in this thread overrides it.
        self._was_skipped, entry.default = entry.default, False
        self._is_overridden = getattr(config, _OPTION)
        if self._is_overridden:
            setattr(config, _OPTION, False)

    def _restore(self) -> None:
        config = _config()
        private(config, "_config")[_OPTION].default = self._was_skipped
        if self._is_overridden:
            setattr(config, _OPTION, True)
        self._was_skipped = None

    @staticmethod
    def _forget_code() -> None:
        private(importlib.import_module(_DYNAMO), "reset_code_caches")()


class _Finder(MetaPathFinder):
    """Notices when dynamo is imported, and finds nothing."""

    def __init__(self, watch: HookWatch) -> None:
        self._watch = watch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == _AFTER_CONFIG:
            self._watch.guard_hooks()


def _config() -> ModuleType:
    return importlib.import_module(f"{_DYNAMO}.config")


hook_watch = HookWatch()
