"""Local and remote sources of bytes, and the detection of file formats."""
