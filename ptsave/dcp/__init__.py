"""Reads checkpoints of torch.distributed.checkpoint (DCP), for all other packages of ptsave."""
