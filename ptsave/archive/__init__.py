"""Opens, checks, unpickles and repairs torch archives."""
