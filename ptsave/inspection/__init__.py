"""Lists, verifies and extracts the contents of a file."""
