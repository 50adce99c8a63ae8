"""Saves that outlive their call."""
