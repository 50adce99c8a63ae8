"""``python -m ptsave`` is the ``ptsave`` command."""

from ptsave.cli.main import main

if __name__ == "__main__":
    main()
