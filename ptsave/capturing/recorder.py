"""Makes records of calls and values, and adds the captured tensors to the file.

A record, or row, is a plain tuple with the fields of `CapturedCall` or `CapturedValue`, because
each hook must finish within 20 us.
"""

from __future__ import annotations

import enum
import sys
import threading
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ptsave.capturing.blocks import MAX_VALUES, SMALL_NBYTES, Block, Blocks, Options, Staged
from ptsave.capturing.schema import escape
from ptsave.capturing.tensors import (
    PLAIN_TYPES,
    is_expanded_far,
    is_freed,
    keeps_storage,
    local_values,
    statistics_of,
    why_no_statistics,
)
from ptsave.capturing.torch_names import (
    StopRecomputationError,
    graph_task_id,
    is_transforming,
    is_wrapped,
    never_compiled,
    outside_transforms,
    unwrapped,
    version_of,
)

_PLAIN = (bool, int, float, complex, str)
_AS_TEXT = (bytes, bytearray, range, slice, torch.dtype, torch.device, torch.Size, enum.Enum)
_MAX_TEXT = 200

_COLON = "%3A"
_MAX_DEPTH = 50
# A tensor's key in the file, a note, its statistics, and its unfinished copy to the host.
_Kept: TypeAlias = tuple[str, str, tuple[Any, ...] | None, Staged | None]
_GRADIENTS_OF = {"forward": "backward", "recompute": "recompute_backward"}


class Site:
    """A module, and its path in the model."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.text = escape(path)
        self.class_name = class_name(module)
        self.counts: dict[str, Iterator[int]] = {}  # counters of calls, by phase


@dataclass(slots=True, eq=False)
class Call:
    """A module call that has begun; until it ends, `frame` is the frame in torch that runs it."""

    site: Site
    step: int
    phase: str
    number: int
    order: int
    id: int
    name: str
    error: BaseException | None  # the error that was being handled when the call began
    parent: int | None = None
    stack: tuple[str, ...] = ()
    frame: FrameType | None = None

    def row(self, end: int, status: str, error: str) -> tuple[Any, ...]:
        return (
            self.id,
            self.step,
            self.phase,
            self.site.path,
            self.number,
            self.site.class_name,
            self.order,
            end,
            self.parent,
            status,
            error,
            self.stack,
        )


class Seen(NamedTuple):
    """A recorded tensor, with the version (see `version_of`) that was recorded."""

    ref: weakref.ref[Tensor]
    version: int
    row: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Hooked:
    """A tensor whose gradient will be recorded under the names of all calls that used it."""

    ref: weakref.ref[Tensor]
    version: int
    owners: list[tuple[Call, str]]
    n_gradients: int = 0  # more than one if a backward pass is repeated


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


class Recorder:
    """Records the calls and values of one run; `n_steps` is 1 plus the last recorded step."""

    def __init__(self, blocks: Blocks, options: Options, n_threads: int) -> None:
        self.recording = False
        self.running = True
        self.step = 0
        self.n_steps = 0
        self.n_calls = 0
        self.n_values = 0
        self._blocks = blocks
        self._options = options
        self._n_threads = n_threads
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._event = count().__next__
        self._call_id = count().__next__
        self._open: dict[int, Call] = {}
        self._seen: dict[int, Seen] = {}
        self._block_number = count()
        self._block = Block(0, next(self._block_number))
        self._hooked: dict[int, Hooked] = {}
        self._handles: list[Any] = []  # hooks of tensors that are not leaves
        self._leaves: dict[int, tuple[Hooked, Any]] = {}  # hooks of leaves, by id
        self._texts: dict[Any, str] = {}

    # --------------------------------------------------------------------------------- steps

    def begin_step(self, step: int, *, recording: bool) -> None:
        self.step = step
        self._block_number = count()
        self._block = Block(step, next(self._block_number))
        self.recording = recording

    def end_step(self) -> None:
        """Pass the records of the step to `Blocks`, and forget the step's tensors."""
        self._seen.clear()
        self._hooked.clear()
        self._hand_over(more=False)
        self._handles = [handle for handle in self._handles if _is_alive(handle)]
        # A leaf may get this step's gradient later; gradients after that belong to other steps.
        for key, (hooked, handle) in list(self._leaves.items()):
            if hooked.n_gradients or not _is_alive(handle):
                handle.remove()
                self._leaves.pop(key, None)

    def end(self) -> None:
        """Record the calls that never ended, and release all tensors."""
        self.recording = self.running = False
        for call in list(self._open.values()):
            self._end_unseen(call)
        self.end_step()
        for handle in (*self._handles, *(handle for _, handle in self._leaves.values())):
            handle.remove()
        self._handles.clear()
        self._leaves.clear()

    def _hand_over(self, *, more: bool = True) -> None:
        with self._lock:
            block = self._block
            if more and len(block.values) < MAX_VALUES:
                return
            self._block = Block(self.step, next(self._block_number))
        if block.calls or block.values:
            self.n_steps = block.step + 1
        self.n_calls += len(block.calls)
        self.n_values += len(block.values)
        self._blocks.finish(block)

    # --------------------------------------------------------------------------------- calls

    def begin(self, site: Site) -> Call:
        phase = "forward" if graph_task_id() == -1 else "recompute"
        with self._lock:
            numbers = site.counts.get(phase)
            if numbers is None:
                numbers = site.counts[phase] = count()
            number, order, call_id = next(numbers), self._event(), self._call_id()
            name = f"{self.step}/{phase}/{site.text}#{number}"
            error = sys.exc_info()[1]
            call = Call(site, self.step, phase, number, order, call_id, name, error)
            self._open[call.id] = call
        call.frame = sys._getframe(2)
        calls = self._thread.calls
        while calls and not _is_running(calls[-1].frame):
            self._end_unseen(calls.pop())
        if calls:
            call.parent = calls[-1].id
        if self._options.call_stacks:
            call.stack = _stack()
        calls.append(call)
        return call

    def end_call(self, site: Site, result: object) -> Call | None:
        """Record that a call has ended; return its `Call` if it ended normally, otherwise None."""
        calls = self._thread.calls
        for i in range(len(calls) - 1, -1, -1):
            if calls[i].site is site:
                while len(calls) > i + 1:
                    self._end_unseen(calls.pop())
                call = calls.pop()
                call.frame = None
                break
        else:
            return None
        status, error = _outcome(call, result) if result is None else ("returned", "")
        self._block.calls.append(call.row(self._event(), status, error))
        self._open.pop(call.id, None)
        return call if status == "returned" else None

    def _end_unseen(self, call: Call) -> None:
        """Record a call as unfinished, because no hook saw its end (KeyboardInterrupt, ...)."""
        call.frame = None
        self._block.calls.append(call.row(self._event(), "unfinished", ""))
        self._open.pop(call.id, None)

    # -------------------------------------------------------------------------------- values

    def arguments(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool, grads: bool
    ) -> None:
        """If `keep`, record the arguments of a call; if `grads`, register gradient hooks."""
        for i, value in enumerate(args):
            self.value(call, f"inputs/{i}", value, keep, grads)
        for key, value in kwargs.items():
            self.value(call, f"inputs/{_keyword_part(key, len(args))}", value, keep, grads)

    def value(  # noqa: PLR0917
        self, call: Call, path: str, value: Any, keep: bool, grads: bool, depth: int = 0
    ) -> None:
        """If `keep`, record a value and everything in it; if `grads`, register gradient hooks."""
        if isinstance(value, Tensor):
            if keep:
                self.tensor(f"{call.name}/{path}", call.id, value)
            if grads and value.requires_grad:
                self._hook_gradient(call, path, value)
            return
        items = None if depth >= _MAX_DEPTH else _items_of(value)
        if keep:
            self._describe_other(call, path, value, items, depth)
        for part, item in items or ():
            self.value(call, f"{path}/{part}", item, keep, grads, depth + 1)

    def _describe_other(
        self, call: Call, path: str, value: Any, items: list[tuple[str, Any]] | None, depth: int
    ) -> None:
        note, text = "", None
        if value is None or isinstance(value, _PLAIN):
            text = value
            if value is not None and type(value) not in _PLAIN:  # an enum, a subclass
                text = next(kind(value) for kind in _PLAIN if isinstance(value, kind))  # type: ignore[arg-type]
        elif isinstance(value, _AS_TEXT):
            text = repr(value)[:_MAX_TEXT]
        elif items is None:
            note = "not looked into"
            if depth >= _MAX_DEPTH:
                note += f": nested deeper than {_MAX_DEPTH} levels"
        kind = "plain" if items is None else "container"
        shape = () if items is None else (len(items),)
        self._append(
            (
                f"{call.name}/{path}",
                self._event(),
                call.id,
                kind,
                self._text(type(value), _type_name),
                *("", "", "", shape, 0, False, ""),
                text,
                note,
                None,
            )
        )

    def tensor(self, name: str, call: int | None, tensor: Tensor) -> None:
        """Record a tensor as it is now."""
        version = version_of(tensor)
        seen = self._seen.get(id(tensor))
        if seen is not None and seen.version == version >= 0 and seen.ref() is tensor:
            row = (name, self._event(), call, *seen.row[3:])
        else:
            row = self._describe(name, call, tensor)
            if version >= 0:
                self._seen[id(tensor)] = Seen(weakref.ref(tensor), version, row)
        self._append(row)

    def _append(self, row: tuple[Any, ...]) -> None:
        self._block.values.append(row)
        if len(self._block.values) >= MAX_VALUES:
            self._hand_over()

    def _describe(self, name: str, call: int | None, tensor: Tensor) -> tuple[Any, ...]:
        stored, found, staged = "", None, None
        try:
            is_transformed = is_transforming() or is_wrapped(tensor)
            keep = self._keep_transformed if is_transformed else self._keep
            stored, note, found, staged = keep(name, tensor)
        except NotImplementedError as error:  # a subclass without values of its own
            note = f"no values: {str(error).splitlines()[0]}"[:_MAX_TEXT]
        except RuntimeError:
            if not is_freed(tensor):
                raise
            note = "memory was freed: no values"
        row = (
            name,
            self._event(),
            call,
            "tensor",
            type(tensor).__name__,
            self._text(tensor.dtype),
            self._text(tensor.device),
            self._text(tensor.layout),
            _shape(tensor),
            _nbytes(tensor),
            tensor.requires_grad,
            stored,
            None,
            note,
            found,
        )
        if staged is not None:
            staged.row = len(self._block.values)
        return row

    def _keep(self, name: str, tensor: Tensor) -> _Kept:
        note, found = "", None
        values: Tensor | None = tensor
        plain = type(tensor) in PLAIN_TYPES and tensor.layout == torch.strided
        if not plain or not tensor.is_cpu or tensor.is_nested or tensor.is_quantized:
            values, note = local_values(tensor)
        elif self._options.statistics and self._options.tensors and tensor.nbytes > SMALL_NBYTES:
            return self._keep_large(name, tensor)
        if values is not None and not values.is_cpu:
            return self._stage(name, values, note)
        if values is not None and self._options.statistics:
            found = statistics_of(values, self._n_threads)
            if found is None:
                note = why_no_statistics(values)
        if not self._options.tensors or note.endswith("no values"):
            return "", note, found, None
        is_other = values is not None and note.startswith(("DTensor", "mkldnn", "subclass"))
        kept = values if values is not None and is_other else tensor
        why_not = self._blocks.store(name, kept, _nbytes(kept))
        return ("", why_not, found, None) if why_not else (name, note, found, None)

    def _keep_transformed(self, name: str, tensor: Tensor) -> _Kept:
        """Store the plain tensor inside a tensor that a transform of ``torch.func`` has wrapped."""
        shape = tensor.shape
        with outside_transforms():
            plain = unwrapped(tensor)
            if plain is None:
                return "", "functionalized: no values", None, None
            stored, note, found, staged = self._keep(name, plain)
        if plain.shape != shape and not note:
            note = f"vmap: all samples, as {tuple(plain.shape)}"
        return stored, note, found, staged

    def _keep_large(self, name: str, tensor: Tensor) -> _Kept:
        """Store a large plain tensor; if possible, compute its statistics during the copy."""
        if keeps_storage(tensor):
            why_not, found = self._blocks.store_measured(name, tensor)
        else:
            why_not, found = self._blocks.store(name, tensor, tensor.nbytes), None
        if found is None:
            found = statistics_of(tensor, self._n_threads)
        note = why_not or ("" if found is not None else why_no_statistics(tensor))
        return ("" if why_not else name), note, found, None

    def _stage(self, name: str, values: Tensor, note: str) -> _Kept:
        staged = self._blocks.stage(self._block, name if self._options.tensors else "", values)
        if isinstance(staged, str):
            return "", staged, None, None
        if self._options.statistics and is_expanded_far(values):
            note = note or why_no_statistics(values)
        return staged.name, note, None, staged

    def _text(self, key: Any, function: Any = str) -> str:
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = function(key)
        return text

    # ----------------------------------------------------------------------------- gradients

    def _hook_gradient(self, call: Call, path: str, tensor: Tensor) -> None:
        version = version_of(tensor)
        hooked = self._hooked.get(id(tensor))
        if hooked is not None and hooked.version == version and hooked.ref() is tensor:
            hooked.owners.append((call, path))  # one gradient with several names
            return
        hooked = Hooked(weakref.ref(tensor), version, [(call, path)])
        self._hooked[id(tensor)] = hooked
        handle = tensor.register_hook(partial(self._gradient, hooked))
        if tensor.is_leaf:
            if (earlier := self._leaves.pop(id(tensor), None)) is not None:
                earlier[1].remove()  # later gradients of the tensor belong to this step
            self._leaves[id(tensor)] = hooked, handle
        else:
            self._handles.append(handle)  # the hook is freed together with the graph

    @never_compiled
    def _gradient(self, hooked: Hooked, grad: Tensor | None) -> None:
        if grad is None or not self.running:
            return
        again = f"/again-{hooked.n_gradients}" if hooked.n_gradients else ""
        hooked.n_gradients += 1
        for call, path in hooked.owners:
            prefix = f"{call.step}/{_GRADIENTS_OF[call.phase]}/{call.site.text}#{call.number}"
            self.tensor(f"{prefix}/{path}{again}", call.id, grad)

    # ---------------------------------------------------------------------------- parameters

    def parameter(self, phase: str, site: Site, number: int, name: str, tensor: Tensor) -> None:
        self.tensor(f"{self.step}/{phase}/{site.text}#{number}/{escape(name)}", None, tensor)


def class_name(obj: object) -> str:
    """Return the full name of an object's class."""
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_alive(handle: Any) -> bool:
    return handle.hooks_dict_ref() is not None


def _is_running(frame: FrameType | None) -> bool:
    """Return whether a frame is being executed; if not, clear its variables."""
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def _outcome(call: Call, result: object) -> tuple[str, str]:
    """Return the status and error of a call whose result is None, perhaps because it raised."""
    error = sys.exc_info()[1]
    if error is None or error is call.error:
        return "returned", ""
    if isinstance(error, StopRecomputationError):
        return "stopped", ""
    return "raised", f"{type(error).__name__}: {error}"[:_MAX_TEXT]


def _stack() -> tuple[str, ...]:
    frames = traceback.extract_stack(sys._getframe(3))
    return tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)


def _type_name(kind: type) -> str:
    return (
        kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    )


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    if is_lazy(tensor):
        return ()
    if tensor.is_nested:
        return tuple(map(str, tensor.shape)) if tensor.layout == torch.jagged else (tensor.size(0),)
    return tuple(tensor.shape)


def _nbytes(tensor: Tensor) -> int:
    if is_lazy(tensor) or tensor.is_nested:
        return 0
    return tensor.numel() * tensor.element_size()


# ------------------------------------------------------------------------------- parts of names
# Each element of a container has a different part of the name.  With the keys "1" and 1, the key 1
# gets the part ``1%3Aint``.  No other key gets this part, because colons in keys are not escaped.


def _items_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return a container's elements as pairs (part of the name, element); None for others.

    >>> _items_of({"a/b": 1.5, 1: 2.5, "1": 3.5})
    [('a%2Fb', 1.5), ('1%3Aint', 2.5), ('1', 3.5)]
    """
    if value is None or isinstance(value, (*_PLAIN, *_AS_TEXT)):
        return None
    if isinstance(value, Mapping):
        items = list(value.items())
        return list(
            zip(_parts([key for key, _ in items]), [item for _, item in items], strict=True)
        )
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        return list(zip(map(str, names or range(len(value))), value, strict=False))
    if is_dataclass(value) and not isinstance(value, type):
        return [
            (field.name, getattr(value, field.name))
            for field in fields(value)
            if hasattr(value, field.name)
        ]
    return None


def _keyword_part(name: str, n_positional: int) -> str:
    """Return a keyword argument's part of the name; it differs from positional arguments' parts.

    >>> _keyword_part("mask", 1), _keyword_part("0", 1), _keyword_part("1", 1)
    ('mask', '0%3Akeyword', '1')
    """
    part = escape(name)
    return f"{part}{_COLON}keyword" if part in map(str, range(n_positional)) else part


def _parts(keys: list[Any]) -> Iterable[str]:
    """Return a different part of the name for each key; a str key gets its escaped text."""
    if set(map(type, keys)) <= {str} and len(set(keys)) == len(keys):
        return map(escape, keys)
    taken = {escape(key) for key in keys if type(key) is str}
    found = []
    unused = set(taken)
    for key in keys:
        part = escape(_text_of(key))
        if type(key) is str and part in unused:
            unused.discard(part)
        elif part in taken:
            part = _free(f"{part}{_COLON}{escape(type(key).__name__)}", taken)
        taken.add(part)
        found.append(part)
    return found


def _free(part: str, taken: set[str]) -> str:
    """Return `part`; if another key has it, append the first free number, from 2 on."""
    numbered, number = part, 2
    while numbered in taken:
        numbered, number = f"{part}{_COLON}{number}", number + 1
    return numbered


def _text_of(key: Any) -> str:
    if type(key) is str:
        return key
    try:
        return str(key)[:_MAX_TEXT]
    except Exception:  # `str` runs the key's own code, which may raise any error
        return type(key).__name__
