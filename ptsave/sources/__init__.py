"""Sources of byte ranges, local or remote, and the kinds of files that they hold."""
