"""Directories of torch.distributed.checkpoint, read."""
