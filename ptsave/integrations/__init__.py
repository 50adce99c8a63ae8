"""ptsave inside other libraries: each module serves one, and is imported by who uses that."""
