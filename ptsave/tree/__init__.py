"""The tree of a saved object: names, leaves and views; needs no file."""
