"""Keeps the module path under which existing files refer to `LazyBufferHook`."""

from ptsave.state.lazy_buffers import LazyBufferHook

__all__ = ["LazyBufferHook"]
