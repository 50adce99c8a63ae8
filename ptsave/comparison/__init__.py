"""The differences of two checkpoints."""
