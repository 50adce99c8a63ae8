"""Private names of torch that the hooks of a capture need.

Checked with torch 2.13.0; if a name is missing, `private` raises an ImportError that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.utils import checkpoint

from ptsave.support.torch_names import private

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The number of the backward pass that this thread works on; -1 outside of a pass.
graph_task_id: Callable[[], int] = private(torch._C, "_current_graph_task_id")
# Ends a recomputation that has all values for the backward pass.
StopRecomputationError: type[Exception] = private(checkpoint, "_StopRecomputationError")
_functorch: Any = private(torch._C, "_functorch")
_interpreter: Callable[[], object] = private(_functorch, "peek_interpreter_stack")
# Whether a tensor is wrapped by a transform, which may have ended.
is_wrapped: Callable[[Tensor], bool] = private(_functorch, "is_functorch_wrapped_tensor")
_is_functional: Callable[[Tensor], bool] = private(_functorch, "is_functionaltensor")
_unwrap: Callable[[Tensor], Tensor] = private(_functorch, "get_unwrapped")
# A context manager in which no transform sees operations.
outside_transforms: Callable[[], AbstractContextManager[None]] = private(
    pyfunctorch, "temporarily_clear_interpreter_stack"
)
_eval_frame: Any = private(private(torch._C, "_dynamo"), "eval_frame")
_set_strategy: Callable[[Any, Any], None] = private(_eval_frame, "set_code_exec_strategy")
_FrameExecStrategy: Any = private(_eval_frame, "_FrameExecStrategy")
_FrameAction: Any = private(_eval_frame, "_FrameAction")
# For a frame, and for the frames of everything that it calls.
_NEVER = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
WRAPPED_ATTRIBUTE = "_orig_mod"  # the module inside a module of `torch.compile`
private(torch.ones(()), "_version")


def never_compiled(function: _Function) -> _Function:
    """Make dynamo break graphs at a function, and run the function uncompiled: a decorator.

    ``torch.compiler.disable`` does the same, but imports dynamo, which takes seconds.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "ptsave.capture records here"  # type: ignore[attr-defined]
    _set_strategy(function.__code__, _NEVER)
    return function


def is_transforming() -> bool:
    """Return whether ``torch.func`` transforms the code that runs: ``vmap``, ``grad``, ..."""
    return _interpreter() is not None


def unwrapped(tensor: Tensor) -> Tensor | None:
    """Return the plain tensor in the wrappers of ``torch.func``; None if it may be out of date.

    Under ``vmap`` it has all samples, and so one more dimension.
    """
    while is_wrapped(tensor):
        if _is_functional(tensor):
            return None
        tensor = _unwrap(tensor)
    return tensor


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 if torch does not count."""
    return -1 if tensor.is_inference() else tensor._version
