"""One format into another, or into a smaller file."""
