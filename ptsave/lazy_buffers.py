"""The path by which saved modules name the hook of a lazy buffer: files have it, so it stays."""

from ptsave.state.lazy_buffers import LazyBufferHook

__all__ = ["LazyBufferHook"]
