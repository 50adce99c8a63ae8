"""Measures saves and loads on this machine, for ``ptsave bench`` and the benchmarks."""
