"""Loads state dicts into modules, optimizers and dicts; needs no file."""
