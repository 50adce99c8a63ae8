"""Archives that a running program extends, one entry at a time."""
