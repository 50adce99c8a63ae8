"""The ``ptsave`` command: one module for each of its commands."""
