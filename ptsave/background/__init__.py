"""Saves in the background, which go on after their call has returned."""
