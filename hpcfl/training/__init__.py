"""Local training: settings, mini-batches, losses, SGD, and the two engines."""
