"""State dicts into modules, optimizers and dicts; no file."""
