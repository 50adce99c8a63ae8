"""Reads checkpoints of torch.distributed.checkpoint."""
