"""Records the inputs, outputs, gradients and statistics of module calls."""
