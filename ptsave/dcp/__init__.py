"""Reads files of torch.distributed.checkpoint for all rooms; `distributed` is its plug-in."""
