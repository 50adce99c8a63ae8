"""Measuring saves and loads on this machine: what ``ptsave bench`` and the benchmarks share."""
