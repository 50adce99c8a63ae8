"""The path of a lazy buffer's hook that existing files name."""

from ptsave.state.lazy_buffers import LazyBufferHook

__all__ = ["LazyBufferHook"]
