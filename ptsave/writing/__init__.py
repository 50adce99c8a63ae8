"""Writes an object: pickles it, plans the file, and writes the file."""
