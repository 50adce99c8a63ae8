"""Writes files with bytes from other files, without making tensors of these bytes."""
