"""Finds the differences between two checkpoints."""
