"""A folder for PYTHONPATH, in which Python finds `sitecustomize` when it starts."""
