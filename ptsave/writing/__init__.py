"""An object becomes a pickle, a plan and a file."""
