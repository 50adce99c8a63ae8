"""Hooks of modules, parameters and optimizers: they report calls, gradients and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ptsave.capturing.recorder import Recorder, Site
from ptsave.capturing.torch_names import hook_watch, never_compiled
from ptsave.support.torch_modules import parameters_of


class _ModuleHooks:
    """The two hooks of a module; torch.compile does not compile them or functions that they call.

    Copies of the module, and modules from a pickle, get hooks that do nothing.
    """

    def __init__(self, hooks: Hooks, site: Site) -> None:
        self._hooks = hooks
        self._recorder = hooks.recorder
        self._site = site

    def __reduce__(self) -> tuple[Any, ...]:
        return idle_hooks, ()

    @never_compiled
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self._recorder
        if not recorder.recording:
            return
        if self._hooks.step != recorder.step:
            self._hooks.begin_step()
        call = recorder.begin(self._site)
        hooks = self._hooks
        if hooks.inputs or hooks.grads:
            recorder.arguments(call, args, kwargs, hooks.inputs, hooks.grads)

    @never_compiled
    def after(self, module: nn.Module, args: object, result: object) -> None:
        recorder = self._recorder
        if not recorder.recording:
            return
        call = recorder.end_call(self._site, result)
        hooks = self._hooks
        if call is not None and (hooks.outputs or hooks.grads):
            recorder.value(call, "outputs", result, hooks.outputs, hooks.grads)
        if hooks.late:
            hooks.record_late(self._site)


class _Idle:
    """Takes the place of a `Recorder`, but records nothing."""

    recording = False


def idle_hooks() -> _ModuleHooks:
    """Return hooks that do nothing; pickles of hooked modules refer to this function."""
    hooks = object.__new__(_ModuleHooks)
    vars(hooks)["_recorder"] = _Idle
    return hooks


class Hooks:
    """Installs and removes the hooks of a capture."""

    def __init__(self, recorder: Recorder, sites: Iterable[Site], what: Iterable[str]) -> None:
        wanted = set(what)
        self.recorder = recorder
        self.inputs = "inputs" in wanted
        self.outputs = "outputs" in wanted
        self.grads = "grads" in wanted
        self.params = "params" in wanted
        self.step = -1  # the last step that `begin_step` has begun
        self.late: dict[Site, list[str]] = {}  # parameters that are not initialized yet
        self._sites = list(sites)
        self._handles: list[Any] = []
        self._hooked: dict[int, tuple[Tensor, list[tuple[Site, str]]]] = {}
        self._counts: dict[tuple[Site, str], int] = {}  # gradients of a parameter in a step
        self._counted_step = -1
        self._is_watched = False

    def install(self) -> None:
        try:
            for site in self._sites:
                hooks = _ModuleHooks(self, site)
                self._handles += [
                    site.module.register_forward_pre_hook(hooks.before, with_kwargs=True),
                    site.module.register_forward_hook(hooks.after, always_call=True),
                ]
            self._hook_parameters()
            self._is_watched = True
            hook_watch.begin()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        if self._is_watched:
            self._is_watched = False
            hook_watch.end()

    # ---------------------------------------------------------------------------- parameters

    def begin_step(self) -> None:
        """Record the parameters before the first call of a step."""
        self.step = self.recorder.step
        for site in self._sites:
            site.counts.clear()
        self._hook_parameters()
        if self.params:
            for site in self._sites:
                self._record(site, parameters_of(site.module))

    def record_late(self, site: Site) -> None:
        names = self.late.pop(site, None)
        if names is not None:
            self._hook_parameters()
            parameters = parameters_of(site.module)
            self._record(site, {name: parameters.get(name) for name in names})

    def _record(self, site: Site, parameters: dict[str, Tensor | None]) -> None:
        for name, parameter in parameters.items():
            if parameter is None:
                continue
            if nn.parameter.is_lazy(parameter):
                self.late.setdefault(site, []).append(name)
            else:
                self.recorder.parameter("params", site, 0, name, parameter)

    def _hook_parameters(self) -> None:
        """Register hooks on parameters that require gradients and have no hook yet."""
        if not self.grads:
            return
        for site in self._sites:
            for name, parameter in parameters_of(site.module).items():
                if parameter is None or not parameter.requires_grad or not parameter.is_leaf:
                    continue
                if id(parameter) in self._hooked:
                    owners = self._hooked[id(parameter)][1]
                    if (site, name) not in owners:
                        owners.append((site, name))
                elif not nn.parameter.is_lazy(parameter):
                    self._hook_parameter(site, name, parameter)

    def _hook_parameter(self, site: Site, name: str, parameter: Tensor) -> None:
        owners = [(site, name)]
        self._hooked[id(parameter)] = parameter, owners
        with suppress(RuntimeError):  # not a leaf, such as a view of a flat parameter
            hook = partial(self._accumulated, owners)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @never_compiled
    def _accumulated(self, owners: list[tuple[Site, str]], parameter: Tensor) -> None:
        recorder = self.recorder
        if not recorder.recording or parameter.grad is None:
            return
        if self._counted_step != recorder.step:  # a backward can come before the first forward
            self._counted_step = recorder.step
            self._counts.clear()
        # Gradients are counted by name: FSDP2 makes two parameters from one, each with a gradient.
        for site, name in owners:
            number = self._counts.get((site, name), 0)
            self._counts[site, name] = number + 1
            recorder.parameter("grads", site, number, name, parameter.grad)


class OptimizerSteps:
    """Calls `step` after each optimizer step; if `optimizer` is None, only counts the steps."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, step: Callable[[], None]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._handle: Any = None
        # By the id of a parameter, because a program may create a new optimizer for each step.
        self._counts: dict[int, int] = {}

    def check(self) -> None:
        """Raise a ValueError if the model is trained, but not by this optimizer."""
        optimizer = self._optimizer
        if optimizer is None or not hasattr(optimizer, "param_groups"):
            return
        is_trained = any(each.requires_grad for each in self._model.parameters())
        if is_trained and self._first_trained(optimizer) is None:
            raise ValueError(
                f"the optimizer ({type(optimizer).__name__}) has none of the model's parameters: "
                "pass the optimizer that trains the model; or pass no optimizer, and call "
                "capture.step() at the end of each step"
            )

    def install(self) -> None:
        if self._optimizer is None:
            self._handle = register_optimizer_step_post_hook(self._count)
        else:
            self._handle = self._optimizer.register_step_post_hook(self._mark)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def n_unmarked(self) -> int:
        """The largest step count among the model's optimizers; 0 if `optimizer` is given."""
        return max(self._counts.values(), default=0)

    @never_compiled
    def _mark(self, *_: object) -> None:
        self._step()

    @never_compiled
    def _count(self, optimizer: Optimizer, *_: object) -> None:
        if (first := self._first_trained(optimizer)) is not None:
            self._counts[first] = self._counts.get(first, 0) + 1

    def _first_trained(self, optimizer: Optimizer) -> int | None:
        """Return the id of the optimizer's first parameter that belongs to the model, or None."""
        own = {id(parameter) for parameter in self._model.parameters()}
        ids = (id(each) for group in optimizer.param_groups for each in group["params"])
        return next((each for each in ids if each in own), None)
