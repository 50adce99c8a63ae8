"""Private names of torch that the hooks of a capture need.

Checked with torch 2.13.0; if a name is missing, `private` raises an ImportError that names it.

Code compiled by `torch.compile` must notice when module hooks are added or removed.  Dynamo
compiles a module's call without hooks if the module has none at that moment.  By default, compiled
code does not look for new hooks later (`skip_nnmodule_hook_guards`).  So code that was compiled
before the hooks were added, even for another instance of the class, would ignore them.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.utils import checkpoint

from ptsave.support.torch_names import private

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The number of the backward pass that this thread works on; -1 outside of a pass.
graph_task_id: Callable[[], int] = private(torch._C, "_current_graph_task_id")
# Activation checkpointing raises this to end a recomputation that has all needed values.
StopRecomputationError: type[Exception] = private(checkpoint, "_StopRecomputationError")
_functorch: Any = private(torch._C, "_functorch")
_interpreter: Callable[[], object] = private(_functorch, "peek_interpreter_stack")
# Whether a transform (vmap, grad, ...) has wrapped a tensor, even if the transform has ended.
is_wrapped: Callable[[Tensor], bool] = private(_functorch, "is_functorch_wrapped_tensor")
_is_functional: Callable[[Tensor], bool] = private(_functorch, "is_functionaltensor")
_unwrap: Callable[[Tensor], Tensor] = private(_functorch, "get_unwrapped")
# A context manager in which operations bypass all transforms.
outside_transforms: Callable[[], AbstractContextManager[None]] = private(
    pyfunctorch, "temporarily_clear_interpreter_stack"
)
_eval_frame: Any = private(private(torch._C, "_dynamo"), "eval_frame")
_set_strategy: Callable[[Any, Any], None] = private(_eval_frame, "set_code_exec_strategy")
_FrameExecStrategy: Any = private(_eval_frame, "_FrameExecStrategy")
_FrameAction: Any = private(_eval_frame, "_FrameAction")
# Makes dynamo skip a frame, and the frames of all functions that it calls.
_NEVER = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
WRAPPED_ATTRIBUTE = "_orig_mod"  # the module inside a module of `torch.compile`
private(torch.ones(()), "_version")


def never_compiled(function: _Function) -> _Function:
    """Decorate a function so that dynamo breaks the graph, and runs the function uncompiled.

    ``torch.compiler.disable`` does the same, but imports dynamo, which takes seconds.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "ptsave.capture records here"  # type: ignore[attr-defined]
    _set_strategy(function.__code__, _NEVER)
    return function


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` is running: ``vmap``, ``grad``, ..."""
    return _interpreter() is not None


def unwrapped(tensor: Tensor) -> Tensor | None:
    """Return the plain tensor inside ``torch.func``'s wrappers, or None inside ``functionalize``.

    Under ``vmap`` the plain tensor has all samples, and so one more dimension.
    """
    while is_wrapped(tensor):
        if _is_functional(tensor):
            return None
        tensor = _unwrap(tensor)
    return tensor


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 if torch does not count changes."""
    return -1 if tensor.is_inference() else tensor._version


_DYNAMO = "torch._dynamo"
_AFTER_CONFIG = f"{_DYNAMO}.convert_frame"  # dynamo imports this module after its configuration
_OPTION = "skip_nnmodule_hook_guards"


class HookWatch:
    """Makes dynamo compile code again when hooks were added or removed, so that hooks are called.

    All compiled code is dropped, because the watch cannot know which modules the code calls.
    The watch does not import dynamo, because that takes seconds.
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
        """Make dynamo check for new hooks in all code that it compiles from now on."""
        if self._was_skipped is not None or not self._n:
            return
        config = _config()
        entry = private(config, "_config")[_OPTION]
        # The default applies to all threads; a value that this thread has set overrides it.
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
    """Notices when dynamo is imported; it finds no modules itself."""

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
