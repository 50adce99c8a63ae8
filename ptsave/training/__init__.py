"""Saves and resumes a training run."""
