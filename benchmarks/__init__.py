"""ptsave's benchmarks: ``python -m benchmarks`` runs all of them, ``demo.py`` is `make demo`."""
