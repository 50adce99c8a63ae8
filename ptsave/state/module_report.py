"""Finds everything that torch would list as an error of loading a module's state dict."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ptsave.state.lazy_buffers import lazy_buffer_hooks
from ptsave.state.module_loading import Checking, StateDictPart, raise_for_result_of_hook
from ptsave.state.trusted_loading import (
    hooks_that_look,
    own_tensors,
    run_trusted_code,
    runs_torchs_method,
    sets_extra_state,
)
from ptsave.support.torch_modules import (
    EXTRA_STATE_KEY_SUFFIX,
    IncompatibleKeys,
    buffers_of,
    children_of,
    post_hooks_of,
)
from ptsave.tree.containers import items_of


class _UnknownMethodError(Exception):
    """Raised for a module with its own method for loading: only a call tells its errors."""


class Report(Checking):
    """Finds everything that torch would list, once an error is certain.

    Hooks run as under torch, because they may rename entries and edit the lists of keys, but
    nothing is copied.
    """

    def run(self, module: nn.Module, entries: Mapping[str, Any], strict: bool) -> None:
        """Raise all errors, unless they cannot be known, or hooks have mended them."""
        with contextlib.suppress(_UnknownMethodError):
            self.load(module, OrderedDict(items_of(entries)), "")
            self.raise_errors(module, strict)

    def load(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        metadata = self._metadata_at(prefix)
        if not runs_torchs_method(module, entries, prefix, metadata):
            raise _UnknownMethodError
        part = StateDictPart(entries, prefix)
        part.is_kept = True  # hooks may keep it
        run_trusted_code(module, entries, prefix, metadata)
        for hook in hooks_that_look(module):
            self._lend(entries)
            hook(entries, prefix, metadata, True, self.missing, self.unexpected, self.errors)
        own = self._own_tensors(module, entries, prefix)
        self._load_by_torch(module, own, part, metadata, sets_extra_state(module))
        for name, child in children_of(module).items():
            if child is not None:
                child_prefix = prefix + name + "."
                self.load(child, part.of_child(name, child_prefix, self.foreign_runs), child_prefix)
        keys = IncompatibleKeys(self.missing, self.unexpected)
        for hook in post_hooks_of(module).values():
            self._lend({})
            if hook(module, keys) is not None:
                raise_for_result_of_hook()

    def _own_tensors(
        self, module: nn.Module, entries: dict[str, Any], prefix: str
    ) -> dict[str, Tensor]:
        present = buffers_of(module)
        wanted: dict[str, Any] = {
            hook.name: hook.wanted(entries, prefix + hook.name, present.get(hook.name))
            for hook in lazy_buffer_hooks(module)
        }
        return own_tensors(module, wanted)

    def _load_extra_state(
        self, module: nn.Module, own: dict[str, Tensor], part: StateDictPart, is_set: bool
    ) -> int:
        key = part.prefix + EXTRA_STATE_KEY_SUFFIX
        found = key in part.entries
        if found != is_set:
            (self.unexpected if found else self.missing).append(key)
        return int(found and EXTRA_STATE_KEY_SUFFIX not in own)

    def _lend(self, entries: dict[str, Any]) -> None:
        self.lender.lend(entries)
        self.foreign_runs += 1
