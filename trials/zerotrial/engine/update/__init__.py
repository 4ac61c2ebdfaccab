"""From gradients to new weights: optimizers, and where their states lie."""
