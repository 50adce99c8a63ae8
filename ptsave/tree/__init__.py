"""The tree of a saved object: names, leaves, views; no file."""
