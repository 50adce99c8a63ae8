"""A stand-in for CUDA's runtime, which lets torch's CUDA build run on a machine without a GPU."""
