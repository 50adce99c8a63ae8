"""Tuning, progress, threads, limits of memory, and the adapter to torch's private names."""
