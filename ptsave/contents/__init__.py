"""Opens checkpoints of any kind without reading their tensors."""
