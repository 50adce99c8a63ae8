"""The ``ptsave`` command-line tool."""
