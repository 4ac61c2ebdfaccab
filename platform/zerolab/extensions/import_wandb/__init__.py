"""Import of offline runs of Weights & Biases: `zerolab import`."""
