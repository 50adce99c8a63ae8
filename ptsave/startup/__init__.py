"""A folder for PYTHONPATH, where Python finds `sitecustomize` at its start."""
