"""Ranges of bytes near or far, and the kind of file they are."""
