"""Records inputs, outputs, gradients and statistics of the calls of modules."""
